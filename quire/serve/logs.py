"""The log of a server process: bounded in rate, harmless when it cannot be written.

Owns handlers and filters. Does not own what is logged.
Invariants: a full disk or a closed pipe behind stdout or stderr never stops the server; equal lines beyond
`MAX_REPEATS` in `WINDOW_S` are counted, not written.
"""

from __future__ import annotations

import logging
import os
import time

from quire.core import env

MAX_REPEATS = 20
WINDOW_S = 10.0
MAX_LINE_CHARS = 4000


class Damper(logging.Filter):
    """Lets each place in the code log so often; then says how many lines were left out."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[tuple[str, int], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """False for a line that is one too many."""
        place, now_s = (record.pathname, record.lineno), time.monotonic()
        since_s, count = self._seen.get(place, (now_s, 0))
        if now_s - since_s > WINDOW_S:
            n_left_out = count - MAX_REPEATS
            since_s, count = now_s, 0
            if n_left_out > 0:
                record.msg, record.args = f"{record.getMessage()} (and {n_left_out} more like it)", None
        self._seen[place] = (since_s, count + 1)
        return count < MAX_REPEATS


class OneLine(logging.Formatter):
    """No control characters of others in a line, and no endless lines; a traceback keeps its own."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        text = super().formatMessage(record)
        if not text.isprintable():
            text = text.encode("unicode_escape").decode("ascii")
        return text if len(text) <= MAX_LINE_CHARS else text[: MAX_LINE_CHARS - 1] + "…"


def set_up() -> None:
    """A handler on stderr if the program has none. Access lines are not damped: they are asked for."""
    logging.raiseExceptions = False
    if logging.getLogger().handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(OneLine("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    damper = Damper()
    handler.addFilter(lambda record: record.name == "quire.access" or damper.filter(record))
    logging.getLogger().addHandler(handler)
    logging.getLogger("quire").setLevel(env.log_level())


def hold_standard_files() -> None:
    """Open /dev/null where stdin, stdout or stderr is closed: a socket must not get their numbers."""
    number = os.open(os.devnull, os.O_RDWR)
    while number <= 2:
        number = os.open(os.devnull, os.O_RDWR)
    os.close(number)
