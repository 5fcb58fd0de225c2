"""`LeadingWorker`: rank 0 of several. What it does beside steps, all ranks do.

Owns that. Steps reach the others through `executors/ranks.py`.
"""

from __future__ import annotations

from collections.abc import Callable

from quire.compute.worker import Allocation, Worker, WorkerFacts
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
        is_first = self.group.start()
        try:
            if is_first:
                self.meet()
            return super().load()
        except RuntimeError as error:  # a rank is gone
            raise self.group.cause(error) from error

    def allocate(self, allocation: Allocation) -> None:
        self.group.say(Allocate(allocation))
        super().allocate(allocation)

    def draft_costs(self) -> DraftCosts | None:
        self.group.say(Measure())
        return super().draft_costs()

    def sleep(self, level: int) -> None:
        self.group.say(SleepRanks(level))
        super().sleep(level)

    def wake(self) -> None:
        self.group.say(WakeRanks())
        super().wake()

    def close(self) -> None:
        self.group.stop()
        super().sleep(2)
