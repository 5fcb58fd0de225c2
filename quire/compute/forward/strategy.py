"""`Forward`: one way to compute a step. Which ones there are, and in which order they are asked, is the platform's."""

from __future__ import annotations

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


class Follower(Forward, Protocol):
    """One whose steps may begin where only the device knows."""

    def follows(self, step: Step, most_behind: np.ndarray) -> bool:
        """Whether `run` takes such a step, whose spans all verify drafts, whatever these are. most_behind: int64
        [n_spans], how far before its planned start each may begin."""
        ...
