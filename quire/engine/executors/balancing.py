"""Rearranges experts between steps of an executor, on all ranks: `--enable-eplb`.

Owns when: the loads of a window before every so many steps, then one layer between two steps. Does not own what is done
(`compute/expert_balancer`).
Invariants: ranks hear of it between the same two plans; not while a step waits for its masks, behind which ranks still
speak with one another; where it fails, no rank goes on, since a matrix may be half of one expert and half of another.
"""

from __future__ import annotations

import collections
import concurrent.futures
from collections.abc import Callable
from typing import Protocol

from quire.config.eplb import EplbConfig
from quire.core.balance import BalanceStage
from quire.core.plan import StepMasks, StepPlan
from quire.core.result import StepResult
from quire.engine.executors.executor import Executor, RanksLost
from quire.engine.executors.inline import Drafts
from quire.engine.ranks.wire import BalanceExperts


class Balancer(Protocol):
    """Of rank 0, see `ExpertBalancer`."""

    @property
    def n_pending(self) -> int: ...
    def do(self, stage: BalanceStage) -> None: ...
    def rest(self) -> None: ...


class Group(Protocol):
    """The other ranks, see `RankGroup`."""

    def say(self, said: BalanceExperts) -> None: ...
    def cause(self, error: Exception) -> RanksLost: ...


class BalancingExecutor:
    """`Executor` around that of all ranks."""

    def __init__(
        self,
        ranks: Executor,
        in_turn: Callable[[Callable[[], None]], None],
        group: Group,
        balancer: Balancer,
        eplb: EplbConfig,
    ) -> None:
        """in_turn: has rank 0 do something behind the steps that were submitted, and before those that will be."""
        self._ranks, self._in_turn, self._group, self._balancer, self._eplb = ranks, in_turn, group, balancer, eplb
        self._n_steps = 0
        """Submitted to this executor."""
        self._is_masked = True
        """Whether the newest step has its masks, or needs none."""
        self._due: collections.deque[BalanceStage] = collections.deque()
        self._n_layers, self._is_choosing = 0, False
        """Left to be moved; and whether rank 0, which may be steps behind, has yet to choose them."""

    def prepare(self, plan: StepPlan) -> None:
        """See `Executor`."""
        self._ranks.prepare(plan)

    def submit(self, plan: StepPlan) -> concurrent.futures.Future[StepResult]:
        """See `Executor`."""
        self._note_due()
        try:
            if self._is_masked:
                self._begin_due()
        except RanksLost as loss:
            future: concurrent.futures.Future[StepResult] = concurrent.futures.Future()
            future.set_exception(loss)
            return future
        self._n_steps, self._is_masked = self._n_steps + 1, not plan.masked
        return self._ranks.submit(plan)

    def _note_due(self) -> None:
        n, interval = self._n_steps, self._eplb.step_interval
        if n and n % interval == 0:
            self._due.append(BalanceStage.PLAN)
        if (n + self._eplb.window_size) % interval == 0:
            self._due.append(BalanceStage.MARK)

    def _begin_due(self) -> None:
        is_moving = self._n_layers > 0 or self._is_choosing
        if self._n_layers:
            self._n_layers -= 1
            self._begin(BalanceStage.MOVE)
        for stage in self._due:
            if stage is BalanceStage.MARK:
                self._begin(stage)
            elif not is_moving:  # what was chosen is moved to its end, and loads of another window count then
                self._is_choosing = True
                self._begin(stage)
        self._due.clear()

    def _begin(self, stage: BalanceStage) -> None:
        self._group.say(BalanceExperts(stage))
        self._in_turn(lambda: self._do(stage))

    def _do(self, stage: BalanceStage) -> None:
        """On rank 0."""
        try:
            self._balancer.do(stage)
        except Exception as error:
            self._group.cause(error)  # the next step says so
            return
        if stage is BalanceStage.PLAN:
            self._n_layers, self._is_choosing = self._balancer.n_pending, False

    def drafts(self) -> Drafts:
        """See `Executor`."""
        return self._ranks.drafts()

    def mask(self, masks: StepMasks) -> None:
        """See `Executor`."""
        self._is_masked = True
        self._ranks.mask(masks)

    def shutdown(self) -> None:
        """See `Executor`. The next one begins without layers to move; other ranks forget theirs when they sleep."""
        self._ranks.shutdown()
        self._balancer.rest()
