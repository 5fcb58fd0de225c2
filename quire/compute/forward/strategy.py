"""`Forward`: one way to compute a step. Which ones there are, and in which order they are asked, is the platform's."""

from __future__ import annotations

from typing import Protocol

from quire.compute.runner.step import States, Step


class Forward(Protocol):
    """From prepared steps to states, in the order in which steps come."""

    def run(self, step: Step) -> States | None:
        """Queue the step's work on the device, without a wait.

        None, and nothing is done: this strategy cannot run the step, or one after it is better at it.
        """
        ...
