"""A line in the log every ten seconds while something long goes on: what, how much of how much, for how long.

Owns the clock of it. Does not own what is said elsewhere (a terminal has a bar). Invariant: what is over within the
period says nothing, and a call that does not return for minutes is spoken for all the same.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeVar

logger = logging.getLogger("quire.progress")

PERIOD_S: Final = 10.0
Item = TypeVar("Item")


class Ticker:
    """How far it is."""

    def __init__(self, what: str, total: int, show: Callable[[int], str]) -> None:
        self._what = what
        self._total = total
        self._show = show
        self._start_s = time.monotonic()
        self.done = 0
        """Of the total."""

    def advance(self, n: int) -> None:
        """n more are done."""
        self.done += n

    def line(self) -> str:
        """As in 'loading weights: 1.20 GiB of 15.00 GiB, 30 s'."""
        far = f"{self._show(min(self.done, self._total))} of {self._show(self._total)}, " if self._total else ""
        return f"{self._what}: {far}{time.monotonic() - self._start_s:.0f} s"


def ticked(items: Sequence[Item], what: str) -> Iterator[Item]:
    """The items, counted while the body of a loop runs with each."""
    with ticking(what, len(items)) as ticker:
        for item in items:
            yield item
            ticker.advance(1)


@contextlib.contextmanager
def ticking(what: str, total: int = 0, show: Callable[[int], str] = str) -> Iterator[Ticker]:
    """Log how far the body is, every `PERIOD_S` seconds, from a thread. total: 0 where there is nothing to count."""
    ticker, over = Ticker(what, total, show), threading.Event()

    def tick() -> None:
        while not over.wait(PERIOD_S):
            logger.info("%s", ticker.line())

    thread = threading.Thread(target=tick, daemon=True, name="quire-progress")
    thread.start()
    try:
        yield ticker
    finally:
        over.set()
        thread.join()
