"""The garbage collector beside the engine. Imports nothing of Quire, so that no process pays for torch."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

THRESHOLDS = (10_000, 5, 200)
"""Young objects are looked at seldom: the default thresholds cost up to 20 ms a step. The middle generation has at most
50,000 objects when it is looked at: 200,000 of them, all dead, took 0.1 s. The oldest one is looked at hardly ever: the
engine's prefix tree is there."""
SMALL_HEAP_THRESHOLDS = (10_000, 5, 4)
"""For a process that has little beside what it froze: the oldest generation may be looked at more often."""


class Freezer:
    """Who froze the objects of a process that is not ours. Python counts frozen objects by going through all of them,
    20 ms and more beside torch: where the program froze them they are counted once, and stay frozen."""

    def __init__(self) -> None:
        self._is_ours = False
        self._is_the_programs = False

    def freeze(self) -> bool:
        """Unless they are frozen already. Whether this call did it, and `unfreeze` is to be called."""
        if self._is_ours or self._is_the_programs:
            return False
        self._is_the_programs = gc.get_freeze_count() > 0
        if self._is_the_programs:
            return False
        self._is_ours = True
        gc.freeze()
        return True

    def unfreeze(self) -> None:
        """What `freeze` froze."""
        gc.unfreeze()
        self._is_ours = False


FREEZER = Freezer()
"""Of this process."""


@contextlib.contextmanager
def gc_kept_quiet() -> Iterator[None]:
    """For the while of a batch in a process that is not ours: afterwards all is as it was.

    With torch imported, one look at all objects takes 0.2 s, and a batch makes enough objects to cause it.
    """
    thresholds, is_frozen_here = gc.get_threshold(), FREEZER.freeze()
    gc.set_threshold(*THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        if is_frozen_here:
            FREEZER.unfreeze()


def quiet_gc(thresholds: tuple[int, int, int] = THRESHOLDS) -> None:
    """For a process that serves: what is loaded now stays; later garbage is looked for seldom."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*thresholds)


@contextlib.contextmanager
def no_gc() -> Iterator[None]:
    """For imports in a process that is ours: what they make stays. To look through torch again and again while it is
    imported takes a tenth of that time, and once more when the process ends as much as a fifth."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()


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
