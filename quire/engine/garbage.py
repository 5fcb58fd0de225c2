"""The garbage collector in a process that serves. Imports nothing of Quire, so that no process pays for torch."""

from __future__ import annotations

import gc

THRESHOLDS = (10_000, 20, 50)
"""Young objects are looked at seldom: the default thresholds cost up to 20 ms a step."""


def quiet_gc() -> None:
    """What is loaded now stays; later garbage is looked for seldom."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
