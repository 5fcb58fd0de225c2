"""Entry point of the command `quire`: Ctrl-C ends it with one line and exit code 130, however early it comes.

Everything else is in `command`, imported inside the guard because most of an early Ctrl-C falls into imports.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Sequence

from quire.cli.interrupt import CODE, LINE


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
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # an impatient second Ctrl-C ends at once, without a traceback
        with contextlib.suppress(OSError):
            print(LINE, file=sys.stderr, flush=True)
        return CODE
