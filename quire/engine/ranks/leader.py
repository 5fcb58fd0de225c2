"""`LeadingWorker`: rank 0 of several. What it does beside steps, all ranks do.

Owns that. Steps reach the others through `executors/ranks.py`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Protocol

from quire.compute.facts import WorkerFacts
from quire.compute.runner.runner import Launched
from quire.compute.worker import Allocation, Worker
from quire.core.plan import OnDrafts, StepPlan
from quire.engine.executors.executor import RanksLost, is_out_of_memory
from quire.engine.ranks.done import DoneSteps
from quire.engine.ranks.group import RankGroup
from quire.engine.ranks.wire import Allocate, Measure, SleepRanks, TakeTokens, TellLoads, WakeRanks
from quire.planner.drafts import DraftCosts

LOADS_WAIT_S: Final = 0.5
"""For what other ranks say of their experts, which they do between steps: rank 0 gives a sign of life more often."""


class Meeting(Protocol):
    """All groups of rank 0, see `workers.Meeting`."""

    def join(self) -> None: ...
    def abort(self) -> None: ...
    def close(self) -> None: ...


class LeadingWorker(Worker):
    """See `Worker`. Raises RanksLost in addition: the engine can do nothing any more then."""

    group: RankGroup
    """The others, not started before `load`."""
    meeting: Meeting
    done: DoneSteps
    _asks_loads = False
    """Other ranks were asked, and not all have answered."""
    _loads: Sequence[list[list[int]]] = ()
    """What they said last."""
    is_apart = False
    """It does, or failed at, something that all ranks do: they wait where rank 0 cannot follow."""

    def launch(self, plan: StepPlan, on_drafts: OnDrafts | None = None) -> Launched:
        """See `Worker`; it is counted."""
        launched = super().launch(plan, on_drafts)
        self.done.launched()
        return launched

    def stage(self, plan: StepPlan) -> Callable[[], Launched] | None:
        """See `Worker`; it is counted when it is launched."""
        launch = super().stage(plan)
        return None if launch is None else functools.partial(self._counted, launch)

    def _counted(self, launch: Callable[[], Launched]) -> Launched:
        launched = launch()
        self.done.launched()
        return launched

    def rest(self) -> None:
        """All results are told. Stages receive what was sent to them, so that no message waits for the next request."""
        if self._pipeline is not None:
            self.group.say(TakeTokens())
            self.runner.take_all()

    def load(self) -> WorkerFacts:
        """Start the other ranks, and load with them."""
        with self._together():
            if self.group.start():
                self.group.beside(self.meeting.join)
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

    def expert_loads(self) -> list[list[int]]:
        """See `Worker`; of all data-parallel ranks: of others what they said last, where steps keep them busy."""
        found = super().expert_loads()
        if not found or self.data is None:
            return found
        if not self._asks_loads:
            self.group.say(TellLoads())
            self._asks_loads = True
        if all(one.has_loads(LOADS_WAIT_S) for one in self.group.results):
            self._asks_loads = False
            self._loads = [one.take_loads() for one in self.group.results]
        for loads in self._loads:
            found = [list(map(int.__add__, *layers)) for layers in zip(found, loads, strict=True)]
        return found

    def close(self) -> None:
        """Captured steps first, on all ranks, then the memory that they share, then the groups. Ranks that cannot come
        along are ended before, those that hang on the way in the middle of it."""
        if self.is_apart or not self.group.dismiss():
            self.group.stop()
            self.meeting.abort()
        super().close()
        with contextlib.suppress(RanksLost):  # that was said
            self.group.beside(self.meeting.close)
        self.group.stop()

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        """What all ranks do: rank 0 sees only that it speaks to nobody when another one is gone, which has a reason."""
        was_apart, self.is_apart = self.is_apart, True
        try:
            yield
            self.group.check()  # where that ended by an abort, there is no other sign of it
        except RuntimeError as error:
            if is_out_of_memory(error):  # its own memory
                raise
            raise self.group.cause(error) from error
        self.is_apart = was_apart
