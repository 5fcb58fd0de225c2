"""Steps of one stage of a pipeline: rows come from the stage before, go to the one after, and tokens go back.

Owns what is sent and taken when, and what a stage's tail leaves out. Does not own the links (`dist/pipeline`), nor how
states are computed (`compute/forward`).
Invariants: all stages get all plans, in one order; the first one has every token in its table before it computes it,
and waits for no other; a token of a slot that was closed meanwhile is nobody's. NCCL connects two ranks at their first
message, and who sends it waits on the host: that is one of the warm-up, behind which all is received.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from quire.compute.device.device import Download
from quire.compute.dist.comm import Sent
from quire.compute.dist.pipeline import Link, Pipeline
from quire.compute.forward.strategy import Forward
from quire.compute.runner.pool import KVPool
from quire.compute.runner.runner import Launched, LaunchedStep, Runner, UntoldStep
from quire.compute.runner.step import Step
from quire.compute.runner.tables import SlotTables
from quire.compute.runner.tail import Fetched, Read, Tail
from quire.compute.sample.sampler import ChoiceKind, Sampled
from quire.core.plan import AdapterPut, OnDrafts, StepMasks, StepPlan
from quire.kernels.invariance import RowsAlone


class PassingTail(Tail):
    """Of a stage that is not the last: no row is chosen of, all go on."""

    def wants_all(self, plan: StepPlan) -> bool:
        """Always."""
        return True

    def kind(self, step: Step) -> ChoiceKind | None:
        """Nothing is chosen."""
        return None


class TellingTail(Tail):
    """Of the last stage: the first is told what was chosen."""

    back: Link

    def choose(
        self, step: Step, read: Read, masks: StepMasks | None, then: Callable[[Sampled], None] | None = None
    ) -> tuple[Fetched, Download]:
        """See `Tail`."""
        return super().choose(step, read, masks, self._tell)

    def _tell(self, sampled: Sampled) -> None:
        if len(sampled.token_ids):
            self.back.send(sampled.token_ids.to(torch.int32))


def tail_of(pipeline: Pipeline | None) -> type[Tail]:
    """The tail of a stage; None: of the whole."""
    if pipeline is None:
        return Tail
    return PassingTail if pipeline.after is not None else TellingTail


class Entry:
    """What stands before the first layer of a later stage: rows as the stage before has sent them."""

    def __init__(self, rows: torch.Tensor) -> None:
        """rows: [most of a step, hidden], of the stream's dtype, to be written before each step."""
        self.rows = rows

    def __call__(self, token_ids: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        """As many rows as there are ids, see `Decoder.enter`."""
        rows = self.rows[: len(token_ids)]
        return rows if out is None else out.copy_(rows)


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    """Tokens of one step that the first stage is to receive."""

    step: int
    slots: np.ndarray
    """int64 [m]; the spare slot where its sequence has left."""
    positions: np.ndarray
    """int64 [m]."""
    token_ids: torch.Tensor
    """int32 [m], once `arrival` has been waited for."""
    arrival: Sent


class StageRunner(Runner):
    """See the module. No step of it has drafts."""

    def __init__(
        self,
        pool: KVPool,
        tables: SlotTables,
        tail: Tail,
        forwards: Sequence[Forward],
        pipeline: Pipeline,
        entry: Entry | None,
        *,
        alone: RowsAlone = RowsAlone.NEVER,
        put: Callable[[AdapterPut], None] | None = None,
    ) -> None:
        """entry: of the model; None on the first stage. alone, put: see `Runner`."""
        super().__init__(pool, tables, tail, forwards, alone=alone, put=put)
        self._pipeline, self._entry = pipeline, entry
        self._asked: collections.deque[Asked] = collections.deque()
        """On the first stage, oldest first."""
        if isinstance(tail, TellingTail):
            assert pipeline.back is not None
            tail.back = pipeline.back

    @torch.inference_mode()
    def launch(self, plan: StepPlan, on_drafts: OnDrafts | None = None) -> Launched:
        """See `Runner`. Only on the host as a device does it wait, for rows or tokens."""
        start_s, pipeline = time.perf_counter(), self._pipeline
        step = self._step(plan, self._apply(plan))
        n_rows = len(step.batch.row_slots)
        self._take_needed(plan)
        if pipeline.before is not None and self._entry is not None:
            pipeline.before.receive(self._entry.rows[:n_rows]).wait()
        with self._region(plan):
            states = next(states for forward in self._forwards if (states := forward.run(step)) is not None)
            if pipeline.after is None:
                launched = LaunchedStep(self.tail, step, states, start_s, None, None)
        if pipeline.after is not None:
            pipeline.after.send(states.hidden[:n_rows])
            self._ask(plan.step, step)
            return UntoldStep(plan.step)
        if not plan.masked:
            launched.mask(None)
        return launched

    def stage(self, plan: StepPlan) -> None:
        """A step is launched in its turn."""

    def close(self, slot: int, n_tokens: int = 0) -> None:
        """See `Runner`; its tokens on their way are nobody's."""
        super().close(slot, n_tokens)
        for asked in self._asked:
            asked.slots[asked.slots == slot] = self.tables.spare_slot

    @torch.inference_mode()
    def take_all(self) -> None:
        """See `Runner`; what comes from other stages."""
        while self._asked:
            self._take(self._asked.popleft())

    def _take_needed(self, plan: StepPlan) -> None:
        """Tokens that this step computes, with all that were chosen before them; no more than a step of each stage are
        left on their way, nor one that is no longer in flight: what the last stage has sent is to be received without
        a step that is yet to come."""
        n_left, newest = len(self._asked), plan.step - self._pipeline.most_sent
        for number, asked in enumerate(self._asked, 1):
            if asked.step <= newest or np.isin(asked.slots, plan.spans.slots).any():
                n_left = len(self._asked) - number
        while len(self._asked) > min(n_left, self._pipeline.n_stages):
            self._take(self._asked.popleft())

    def _take(self, asked: Asked) -> None:
        asked.arrival.wait()
        places = np.arange(len(asked.slots))
        self.tables.set_tokens(np.stack([asked.slots, asked.positions, places]), asked.token_ids)

    def _ask(self, number: int, step: Step) -> None:
        """The first stage is to receive what the last will choose."""
        batch, back = step.batch, self._pipeline.back
        if back is None or not len(batch.sampled_slots):
            return
        token_ids = torch.empty(len(batch.sampled_slots), dtype=torch.int32, device=self.tables.tokens.device)
        slots, positions = (one.astype(np.int64) for one in (batch.sampled_slots, batch.sampled_positions))
        self._asked.append(Asked(number, slots, positions, token_ids, back.receive(token_ids)))
