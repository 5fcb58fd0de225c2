"""`LeadingWorker`: rank 0 of several. What it does beside steps, all ranks do.

Owns that. Steps reach the others through `executors/ranks.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from quire.compute.worker import Allocation, Worker, WorkerFacts
from quire.engine.executors.executor import is_out_of_memory
from quire.engine.ranks.group import RankGroup
from quire.engine.ranks.wire import Allocate, Measure, SleepRanks, WakeRanks
from quire.planner.drafts import DraftCosts


class LeadingWorker(Worker):
    """See `Worker`. Raises RanksLost in addition: the engine can do nothing any more then."""

    group: RankGroup
    """The others, not started before `load`."""
    meet: Callable[[], None]
    """Returns when all ranks that are started can speak to one another."""

    def load(self) -> WorkerFacts:
        """Start the other ranks, and load with them."""
        with self._together():
            if self.group.start():
                self.meet()
            return super().load()

    def allocate(self, allocation: Allocation) -> None:
        with self._together():
            self.group.say(Allocate(allocation))
            super().allocate(allocation)

    def draft_costs(self) -> DraftCosts | None:
        with self._together():
            self.group.say(Measure())
            return super().draft_costs()

    def sleep(self, level: int) -> None:
        with self._together():
            self.group.say(SleepRanks(level))
            super().sleep(level)

    def wake(self) -> None:
        with self._together():
            self.group.say(WakeRanks())
            super().wake()

    def close(self) -> None:
        self.group.stop()
        super().close()

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        """What all ranks do: rank 0 sees only that it speaks to nobody when another one is gone, which has a reason."""
        try:
            yield
        except RuntimeError as error:
            if is_out_of_memory(error):  # its own memory
                raise
            raise self.group.cause(error) from error
