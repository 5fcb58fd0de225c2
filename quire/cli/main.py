"""Entry point of the command `quire`: Ctrl-C ends it with one line and exit code 130, however early it comes.

Everything else is in `command`, imported inside the guard because most of an early Ctrl-C falls into imports.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence

from quire.cli.interrupt import CODE, LINE


def main(argv: Sequence[str] | None = None) -> int:
    """Run `quire` with the given arguments (default: those of the process); returns the exit code."""
    try:
        from quire.cli.command import run

        return run(list(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # an impatient second Ctrl-C ends at once, without a traceback
        print(LINE, file=sys.stderr)
        return CODE
