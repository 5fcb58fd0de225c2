"""Steps of one data-parallel rank: its part of each plan, and what it does in a step of which it has none.

Owns what it takes of a plan and of masks. Does not own how plans are divided (`core/plan_parts`).
Invariant: all ranks get all plans, in one order, and launch each of them, so that every rank knows how many rows the
others have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from quire.compute.dist.data_parallel import DataParallel
from quire.compute.dist.exchange import Exchange
from quire.compute.forward.fused import FusedForward, ReadyStep
from quire.compute.forward.strategy import CommonForward, Forward
from quire.compute.models.decoder import Decoder
from quire.compute.models.sent_rows import compute_for_others, sent_of
from quire.compute.runner.pool import KVPool
from quire.compute.runner.runner import Launched, Runner, UntoldStep
from quire.compute.runner.settled import Settled
from quire.compute.runner.step import Step
from quire.compute.runner.tables import PageWrites, SlotTables
from quire.compute.runner.tail import Tail
from quire.core.plan import AdapterPut, OnDrafts, StepMasks, StepPlan
from quire.core.plan_parts import masks_of, part_of, rows_of
from quire.core.result import StepResult
from quire.kernels.invariance import RowsAlone


class PartStep:
    """A step of this rank's part of a plan."""

    def __init__(self, launched: Launched, part: StepPlan, plan: StepPlan, data: DataParallel) -> None:
        self._launched, self._part, self._plan, self._data = launched, part, plan, data

    def mask(self, masks: StepMasks) -> None:
        """masks: of the whole plan."""
        if self._part.masked:
            self._launched.mask(masks_of(masks, self._plan, self._data.dp_rank, self._data.n_slots))

    def result(self) -> StepResult:
        """Of this part; slots and spans are numbered as in it."""
        return self._launched.result()


class DataParallelRunner(Runner):
    """See the module. No step of it has drafts."""

    def __init__(
        self,
        pool: KVPool,
        tables: SlotTables,
        tail: Tail,
        forwards: Sequence[Forward],
        ahead: FusedForward | None,
        data: DataParallel,
        model: Decoder,
        common: CommonForward | None = None,
        *,
        alone: RowsAlone = RowsAlone.NEVER,
        put: Callable[[AdapterPut], None] | None = None,
    ) -> None:
        """model: whose experts know of the exchange, if there is one; common: see `Forwards`. alone, put: see
        `Runner`."""
        super().__init__(pool, tables, tail, forwards, ahead, alone=alone, put=put)
        self._data, self._model, self._common = data, model, common
        data.n_slots = tables.spare_slot  # memory may have chosen fewer since the groups were made
        self._newest: tuple[StepPlan, StepPlan] | None = None
        """A plan, and this rank's part of it."""
        self._rows, self._n_common = list[int](), 0
        """Of that plan: those that each rank has, and see `Step`."""
        self._sent = (0, 0, 0) if data.exchange is None else sent_of(model)
        self.warm_slots = list(range(0, data.size * data.n_slots, data.n_slots))

    @torch.inference_mode()
    def launch(self, plan: StepPlan, on_drafts: OnDrafts | None = None) -> Launched:
        """See `Runner`. plan: of all ranks."""
        part, data = self._part(plan), self._data
        if data.exchange is not None:
            if self._n_common:
                data.exchange.begin_common(self._n_common)
            else:
                data.exchange.begin(self._rows)
        if not part.spans:
            self.tables.write(self._apply(part))
            if self._common is not None and self._n_common:
                self._common.join(self._n_common)
            elif data.exchange is not None:
                compute_for_others(self._model)
            return UntoldStep(plan.step)
        return PartStep(super().launch(part), part, plan, self._data)

    def stage(self, plan: StepPlan) -> Callable[[], Launched] | None:
        """See `Runner`."""
        part = self._part(plan)
        launch = super().stage(part) if part.spans else None
        return None if launch is None else lambda: PartStep(launch(), part, plan, self._data)

    def prepare(self, plan: StepPlan) -> ReadyStep | None:
        """See `Runner`. None also where only other ranks have masks: who submits the step waits for them."""
        part = self._part(plan)
        return super().prepare(part) if part.spans and not plan.masked else None

    def _step(self, plan: StepPlan, writes: PageWrites, settled: Settled | None = None) -> Step:
        """See `Runner`. Where rows are exchanged, all of them go through the last layer's feed-forward: other ranks
        know how many there are, and not how many of these are wanted."""
        step = super()._step(plan, writes, settled)
        step.wants_all |= self._data.exchange is not None
        step.n_common = self._n_common
        return step

    def _part(self, plan: StepPlan) -> StepPlan:
        """Cut once: a plan that could not be made ready before its turn comes again."""
        newest = self._newest
        if newest is None or newest[0] is not plan:
            self._newest = newest = plan, part_of(plan, self._data.dp_rank, self._data.n_slots)
            if self._data.exchange is not None:
                self._rows = rows_of(plan, self._data.size, self._data.n_slots)
                self._n_common = self._common_rows(plan, self._data.exchange)
        return newest[1]

    def _common_rows(self, plan: StepPlan, exchange: Exchange) -> int:
        """Of a step in which all that run decode, see `Step`."""
        if self._common is None or plan.opened or plan.n_tokens != len(plan.spans.slots):
            return 0
        size = next((one for one in self._common.common_sizes if one >= max(self._rows)), 0)
        return size if exchange.may_be_common(size, *self._sent) else 0
