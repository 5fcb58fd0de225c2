"""The log of a process of a server: bounded in rate, one line a record. It goes to stderr, which `stdio.py` guards.

Owns handlers and filters. Does not own what is logged.
Invariant: equal lines beyond `MAX_REPEATS` in `WINDOW_S` are counted, not written.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from quire.core import env, ticker
from quire.engine import stdio

MAX_REPEATS = 20
WINDOW_S = 10.0
MAX_LINE_CHARS = 4000
MAX_TRACEBACK_CHARS = 20_000


class RateLimitFilter(logging.Filter):
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


class OneLineFormatter(logging.Formatter):
    """No control characters of others in a line, no endless lines and tracebacks; these keep their own lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        text = super().formatMessage(record)
        if not text.isprintable():
            text = text.encode("unicode_escape").decode("ascii")
        return text if len(text) <= MAX_LINE_CHARS else text[: MAX_LINE_CHARS - 1] + "…"

    def formatException(self, ei: Any) -> str:
        """Cut in its middle and indented: an exception's message may hold lines of others."""
        text = super().formatException(ei)
        if len(text) > MAX_TRACEBACK_CHARS:
            text = f"{text[: MAX_TRACEBACK_CHARS // 2]}\n…\n{text[-MAX_TRACEBACK_CHARS // 2 :]}"
        lines = ("".join(c if c.isprintable() else ascii(c)[1:-1] for c in line) for line in text.splitlines())
        return "\n".join(f"  {line}" for line in lines)


def set_up(who: str = "") -> None:
    """For the start of a process: guarded standard files, stacks on SIGUSR1, warnings in the log, and a handler on
    stderr if the program has none. Access lines are not damped: they are asked for. who: stands in each line."""
    stdio.take_over()
    stdio.show_stacks_on_signal()
    logging.raiseExceptions = False
    logging.captureWarnings(True)
    show(who)


def show_progress() -> None:
    """For a command that runs in this process: warnings and the lines of `core/ticker` go to stderr, and with
    QUIRE_LOG_LEVEL what it asks for."""
    is_own = not logging.getLogger().handlers
    show()
    if is_own and not env.read("QUIRE_LOG_LEVEL"):
        logging.getLogger("quire").setLevel(logging.WARNING)
        ticker.logger.setLevel(logging.INFO)


def show(who: str = "") -> None:
    """Lines of the log go to stderr if the program has no handler of its own. who: stands in each line."""
    if logging.getLogger().handlers:
        return
    handler = logging.StreamHandler()
    name = f"{who}: " if who else ""
    handler.setFormatter(OneLineFormatter(f"%(asctime)s %(levelname)s %(name)s: {name}%(message)s"))
    rate_limit = RateLimitFilter()
    handler.addFilter(lambda record: record.name == "quire.access" or rate_limit.filter(record))
    logging.getLogger().addHandler(handler)
    logging.getLogger("quire").setLevel(env.log_level())
