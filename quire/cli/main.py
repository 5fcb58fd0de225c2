"""Entry point of the command `quire`: Ctrl-C ends it with one line and exit code 130, however early it comes.

Everything else is imported inside the guard, since most of an early Ctrl-C falls into imports; above it stands only
what the interpreter has loaded already. While the interpreter itself starts, Ctrl-C still prints its traceback.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` would have to be imported
import os
import sys

TYPE_CHECKING = False  # as that of typing, which takes longer to import than all that stands above the guard

if TYPE_CHECKING:
    from collections.abc import Sequence

LINE = "\nquire: interrupted"
CODE = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run `quire` with the given arguments (default: those of the process); returns the exit code."""
    try:
        from quire.engine.stdio import hold_standard_files

        hold_standard_files()
        try:
            os.getcwd()
        except OSError:  # libraries fail at it in their own ways
            print("quire: error: the current folder is gone: change to another one", file=sys.stderr)
            return 1
        from quire.cli.command import run

        return run(list(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt:
        _signal.signal(_signal.SIGINT, _signal.SIG_DFL)  # a second Ctrl-C ends at once, also in the import below
        import contextlib

        with contextlib.suppress(OSError):
            print(LINE, file=sys.stderr, flush=True)
        return CODE
