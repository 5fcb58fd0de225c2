"""The garbage collector beside the engine. Imports nothing of Quire, so that no process pays for torch."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator
from typing import Final

THRESHOLDS = (10_000, 5, 200)
"""Young objects are looked at seldom: the default thresholds cost up to 20 ms a step. The middle generation has at most
50,000 objects when it is looked at: 200,000 of them, all dead, took 0.1 s. The oldest one is looked at hardly ever: the
engine's prefix tree is there."""
SMALL_HEAP_THRESHOLDS = (10_000, 5, 4)
"""For a process that has little beside what it froze: the oldest generation may be looked at more often."""


others_freeze: Final = threading.Event()
"""Set where somebody else was found to have frozen objects, and is left to it: counting a million takes 30 ms."""


@contextlib.contextmanager
def gc_kept_quiet() -> Iterator[None]:
    """For the while of a batch in a process that is not ours: afterwards all is as it was.

    With torch imported, one look at all objects takes 0.2 s, and a batch makes enough objects to cause it.
    """
    if not others_freeze.is_set() and gc.get_freeze_count():
        others_freeze.set()
    thresholds, is_ours = gc.get_threshold(), not others_freeze.is_set()
    gc.set_threshold(*THRESHOLDS)
    if is_ours:
        gc.freeze()
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        if is_ours:
            gc.unfreeze()


def quiet_gc(thresholds: tuple[int, int, int] = THRESHOLDS) -> None:
    """For a process that serves: what is loaded now stays; later garbage is looked for seldom."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*thresholds)


@contextlib.contextmanager
def thawed() -> Iterator[None]:
    """For work that gives memory back, in a process that serves: cycles among what was frozen are garbage meanwhile.

    A runner and the steps captured for it are such a cycle. NCCL waits for these steps when a group of ranks ends.
    """
    gc.unfreeze()
    try:
        yield
    finally:
        gc.collect()
        gc.freeze()
