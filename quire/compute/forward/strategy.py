"""`Forward`: one way to compute a step. Which ones there are, and in which order they are asked, is the platform's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from quire.compute.runner.step import States, Step


class Forward(Protocol):
    """From prepared steps to states, in the order in which steps come."""

    def run(self, step: Step) -> States | None:
        """Queue the step's work on the device, without a wait.

        None, and nothing is done: this strategy cannot run the step, or one after it is better at it.
        """
        ...

    def stage(self, step: Step) -> Callable[[], States] | None:
        """What `run` does on the host, while the step before is perhaps not queued to its end; the rest when that is
        called, before another step comes. None: it is all to be done by `run`.
        """
        ...


class CommonForward(Forward, Protocol):
    """One that has captured steps in which data-parallel ranks send each other rows."""

    common_sizes: Sequence[int]
    """Numbers of rows to which each rank fills up its part of such a step, rising; the same on all ranks."""

    def join(self, n_common: int) -> None:
        """Replay such a step without rows of this rank."""
        ...


class Follower(Forward, Protocol):
    """One whose steps may begin where only the device knows."""

    def follows(self, step: Step, most_behind: np.ndarray) -> bool:
        """Whether `run` takes such a step, whose spans all verify drafts, whatever these are. most_behind: int64
        [n_spans], how far before its planned start each may begin."""
        ...
