"""Executes `StepPlan`s: apply what changed, have a forward strategy compute the states, then the tail what is wanted.

Owns the order of these within a step. Does not own which tokens run (`control`), how states are computed (`forward`)
nor what is made of them (`tail`).
Invariant: `launch` waits for the device only where drafts follow tokens that it has not brought yet; else only
`LaunchedStep.result` does.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch

from quire.compute.device.device import Download
from quire.compute.draft.drafter import Drafter
from quire.compute.forward.fused import FusedForward, ReadyStep
from quire.compute.forward.strategy import Follower, Forward
from quire.compute.runner.batch_builder import build_batch, shared_spans
from quire.compute.runner.lengths import SlotLengths
from quire.compute.runner.pool import KVPool
from quire.compute.runner.settled import Kept, Settled
from quire.compute.runner.step import States, Step
from quire.compute.runner.tables import NO_WRITES, PageWrites, SlotTables
from quire.compute.runner.tail import Tail
from quire.compute.runner.trees import branch
from quire.compute.sample.sampler import split_faults
from quire.core.errors import EngineError
from quire.core.plan import AdapterPut, OnDrafts, StepMasks, StepPlan
from quire.core.result import Fault, StepResult, StepTimings
from quire.kernels.invariance import RowsAlone, rows_alone


class Launched(Protocol):
    """A step that was begun."""

    def mask(self, masks: StepMasks) -> None:
        """What is left of it, if its plan has `masked` spans."""
        ...

    def result(self) -> StepResult:
        """Wait for the device, then plain values."""
        ...


class UntoldStep:
    """A step whose result other ranks tell: it has no rows here, or they were sent on."""

    def __init__(self, step: int) -> None:
        self._step = step

    def mask(self, masks: StepMasks) -> None:
        """Nothing is chosen here."""

    def result(self) -> StepResult:
        """Nothing, of this step."""
        return StepResult(self._step)


class LaunchedStep:
    """A step whose work is queued on the device; the choice of its tokens too, unless the plan has `masked` spans.

    lengths: if drafts are verified on this device; settled: by them, in this step.
    """

    def __init__(
        self,
        tail: Tail,
        step: Step,
        states: States,
        start_s: float,
        lengths: SlotLengths | None,
        settled: Settled | None,
    ) -> None:
        self._tail, self._step, self._start_s = tail, step, start_s
        self._settled = settled
        self.untold = lengths
        """Lengths that do not know all of it; None: they do, or there are none."""
        self._n_opened = 0 if lengths is None else lengths.tokens.n_opened
        self._kept: Kept | None = None
        self._read = tail.read(step, states)
        self._download: Download | None = None
        self._arrived: list[torch.Tensor] = []
        """What it brought, if lengths were to know."""
        self._host_s, self._ended_s = time.perf_counter() - start_s, 0.0

    @property
    def number(self) -> int:
        """Of its plan."""
        return self._step.plan.step

    def mask(self, masks: StepMasks | None) -> None:
        """Queue the rest: the choice, if it is not made yet, under these masks, and the copy to the host."""
        start_s = time.perf_counter()
        lengths, settled, then = self.untold, self._settled, None
        if lengths is not None and settled is not None:
            then = functools.partial(lengths.queue_keep, settled)
        self._fetched, self._download = self._tail.choose(self._step, self._read, masks, then)
        if lengths is not None and lengths.tokens.is_live:
            self.keep()  # it is computed, and the next step is launched before anybody asks for the result
        self._host_s += time.perf_counter() - start_s

    def keep(self) -> None:
        """Wait for the tokens; lengths learn what became of the step, if they have not."""
        lengths, self.untold = self.untold, None
        if lengths is None or self._download is None:
            return
        self._arrived = token_ids, status, *_ = self._download.wait()
        self._ended_s = time.monotonic()  # a step with drafts waits for it here, while it is launched itself
        if self._settled is not None:
            self._kept = lengths.keep(self._settled, token_ids.tolist(), status.tolist())
        batch, n_opened = self._step.batch, self._n_opened
        if self._settled is None:
            lengths.tokens.add(batch.sampled_slots, batch.sampled_positions, token_ids, n_opened)
        else:
            lengths.learn(batch, n_opened, token_ids, self._settled)
        if self._kept is not None and self._kept.walks:
            lengths.straighten(self._kept.walks, self._n_opened)

    def result(self) -> StepResult:
        """Wait for the device, then turn its tensors into plain values."""
        plan = self._step.plan
        if self._download is None:
            raise EngineError(f"step {plan.step} has no masks yet")
        self.keep()
        token_ids, status, *rest = self._arrived or self._download.wait()
        pooled: dict[int, list[float]] = {}
        faults: list[Fault] = []
        if self._read.pooled is not None:
            pooled, faults = self._read.pooled.read(rest.pop(), plan.spans.slots)
        logprobs, prompt = self._fetched.read(rest)
        ids, statuses, slots = token_ids.tolist(), status.tolist(), self._step.batch.sampled_slots
        if self._kept is None:
            tokens, n_new, more_faults = split_faults(ids, statuses, slots)
            last = dict(enumerate(itertools.accumulate(n_new))) if more_faults else None  # else each row has its own
        else:
            tokens, n_new, more_faults, last = self._kept.split_faults(ids, statuses, slots)
        if last is not None:
            logprobs = {last[row] - 1: line for row, line in logprobs.items() if not statuses[row] and row in last}
        return StepResult(
            step=plan.step,
            tokens=tokens,
            n_new=n_new,
            n_drafted=self._kept.n_drafted if self._kept is not None else [],
            logprobs=logprobs,
            prompt_logprobs=prompt,
            pooled=pooled,
            faults=faults + more_faults,
            timings=StepTimings(self._host_s, time.perf_counter() - self._start_s, self._ended_s),
        )


class Runner:
    """The steps of one model on one device.

    forwards: asked in turn, the last takes every step; ahead: one of them that can make steps ready before their turn;
    lengths: where drafts are verified; follower: one of the forwards whose steps may begin where only the device knows.
    """

    def __init__(
        self,
        pool: KVPool,
        tables: SlotTables,
        tail: Tail,
        forwards: Sequence[Forward],
        ahead: FusedForward | None = None,
        lengths: SlotLengths | None = None,
        follower: Follower | None = None,
        *,
        alone: RowsAlone = RowsAlone.NEVER,
        put: Callable[[AdapterPut], None] | None = None,
    ) -> None:
        """alone: which steps are launched in a region of `kernels/invariance`; put: an adapter into a place, None: of
        a model that has none."""
        self._alone, self._put = alone, put
        self.pool, self.tables, self.tail = pool, tables, tail
        self._forwards, self._ahead, self._lengths, self._follower = forwards, ahead, lengths, follower
        self.warm_slots = [0]
        """Of plans: those that mean the first slot here, or on ranks that compute other parts of plans."""
        self._unkept: deque[LaunchedStep] = deque()
        """Steps of which lengths may not know."""

    @torch.inference_mode()
    def launch(self, plan: StepPlan, on_drafts: OnDrafts | None = None) -> Launched:
        """Queue one step on the device. Only one with drafts waits, for the steps whose tokens they follow, and not if
        it follows the newest step on the device.

        on_drafts: called with the drafts of each masked span, before anything is computed; not if the plan has none.
        """
        self._keep_committed(plan.committed)
        is_settled, settled = self._lengths is not None and not _is_known(plan), None
        follows = is_settled and self._follows(plan)
        if is_settled and not follows:
            self._keep_all()
        start_s = time.perf_counter()
        writes = self._apply(plan)
        if self._lengths is not None and is_settled:
            self.tables.write(writes)  # who guesses on the device reads these pages
            settled, writes = self._settle(self._lengths, plan, follows), NO_WRITES
            plan = settled.plan
            if on_drafts is not None:
                on_drafts(self._lengths.drafts_of(settled))
        step = self._step(plan, writes, settled)
        if settled is not None and (computed := self._computed(step, settled, start_s)) is not None:
            return computed
        with self._region(plan):
            states = next(states for forward in self._forwards if (states := forward.run(step)) is not None)
            launched = LaunchedStep(self.tail, step, states, start_s, self._lengths, settled)
        if self._lengths is not None:
            while self._unkept and self._unkept[0].untold is None:  # in their order
                self._unkept.popleft()
            self._unkept.append(launched)
        if not plan.masked:
            launched.mask(None)
        return launched

    @torch.inference_mode()
    def stage(self, plan: StepPlan) -> Callable[[], Launched] | None:
        """What `launch` does on the host, while the step before has no masks yet; the rest when that is called. None:
        `launch` does it all, as it must where slots change, which that step still writes to."""
        if self._lengths is not None or plan.opened or plan.closed or plan.copies or plan.restores:
            return None
        start_s = time.perf_counter()
        step = self._step(plan, self.tables.append(plan.pages))
        with self._region(plan):
            run = self._forwards[0].stage(step)
        return None if run is None else functools.partial(self._launch_staged, step, run, time.perf_counter() - start_s)

    @torch.inference_mode()
    def _launch_staged(self, step: Step, run: Callable[[], States], spent_s: float) -> LaunchedStep:
        start_s = time.perf_counter() - spent_s
        with self._region(step.plan):
            launched = LaunchedStep(self.tail, step, run(), start_s, None, None)
        if not step.plan.masked:
            launched.mask(None)
        return launched

    def _region(self, plan: StepPlan) -> contextlib.AbstractContextManager[None]:
        return rows_alone() if self._is_alone(plan.spans.slots) else contextlib.nullcontext()

    def _follows(self, plan: StepPlan) -> bool:
        """Whether a step with drafts may be launched while the one before it computes."""
        lengths, follower = self._lengths, self._follower
        if lengths is None or follower is None or not lengths.may_follow(plan) or self._is_alone(plan.spans.slots):
            return False
        return follower.follows(self._step(plan, NO_WRITES), lengths.most_behind(plan))

    def _settle(self, lengths: SlotLengths, plan: StepPlan, follows: bool) -> Settled:
        settled = lengths.follow(plan) if follows else None
        if settled is None:
            self._keep_all()
            settled = lengths.settle(plan, may_branch=not self._is_alone(plan.spans.slots))
        return settled

    def _computed(self, step: Step, settled: Settled, start_s: float) -> ReadyStep | None:
        """A settled step, computed and kept, where it is one native call and nothing but its tokens is wanted."""
        ready = None if self._ahead is None else self._ahead.ready(step, start_s)
        if ready is not None and self._lengths is not None:
            ready.compute()
            ready.keep(self._lengths, settled)
        return ready

    def prepare(self, plan: StepPlan) -> ReadyStep | None:
        """All of a step that can be done before its turn; None if it must be launched in its turn, as one with drafts,
        or one of which nobody knows before where its spans begin.

        Steps before it may be computing, so nothing that they see may change: the plan opens and closes no slot, and
        what earlier plans open is open. New pages come behind what those steps see.
        """
        if self._ahead is None or not _is_known(plan) or plan.masked or plan.copies:
            return None
        start_s = time.perf_counter()
        ready = self._ahead.ready(self._step(plan, NO_WRITES), start_s)
        if ready is not None:
            ready.leave_a_core()
            self.tables.append(plan.pages)
        return ready

    @contextlib.contextmanager
    def kernel_by_kernel(self) -> Iterator[None]:
        """Steps run as those do that no other way takes: none is captured."""
        every, self._forwards = self._forwards, self._forwards[-1:]
        try:
            yield
        finally:
            self._forwards = every

    def take_all(self) -> None:
        """Have nothing on its way, when all that was launched has its result: it never is, within one device."""

    def replace_drafter(self, drafter: Drafter, chance: float) -> None:
        """Another one, while no slot is open. Its drafts count with this chance, whatever is chosen: for the speed of
        random weights, and not for sequences under a grammar, whose masks follow from drafts that are chosen."""
        self._lengths = SlotLengths(self.tables, drafter, chance=chance)

    def put_first(self, forward: Forward) -> None:
        """Ask this one before all others, from now on, while no slot is open: for a benchmark. It takes every step, so
        none is made ready before its turn."""
        self._forwards, self._ahead = [forward, *self._forwards], None

    def _is_alone(self, slots: list[int]) -> bool:
        """Whether a step with these must be."""
        if self._alone is RowsAlone.ASKED:
            return bool(self.tables.deterministic[slots].any())
        return self._alone is RowsAlone.ALWAYS

    def _keep_committed(self, step: int) -> None:
        """Lengths know all steps up to this one, on every rank: what they and who guesses have learnt decides what
        is guessed, and how much of it is computed. No wait where the results were asked for."""
        while self._unkept and self._unkept[0].number <= step:
            self._unkept.popleft().keep()

    def _keep_all(self) -> None:
        """Wait until all that was launched is known here."""
        while self._unkept:
            self._unkept.popleft().keep()

    def _step(self, plan: StepPlan, writes: PageWrites, settled: Settled | None = None) -> Step:
        batch = build_batch(plan.spans, plan.masked)
        if settled is not None and settled.trees:
            branch(batch, settled.trees)
        shared = shared_spans(batch, plan.shared_prefixes, self.tables.page_size)
        guesses = None if settled is None else settled.guesses
        adapters = None
        if self._put is not None:
            adapters = self.tables.adapters_of(batch.row_slots, always=self._is_alone(plan.spans.slots))
        return Step(plan, batch, writes, shared, self.tail.wants_all(plan), adapters, guesses)

    def _apply(self, plan: StepPlan) -> PageWrites:
        """Take in what changed; returns what the device's page table still lacks."""
        lens = plan.closed_lens or [0] * len(plan.closed)
        for slot, n_tokens in zip(plan.closed, lens, strict=True):
            self.close(slot, n_tokens)
        for one in plan.adapters:
            assert self._put is not None
            self._put(one)
        for opened in plan.opened:
            self.tail.open(opened)
            if self._lengths is not None:
                self._lengths.open(opened)
        self.tables.open(plan.opened)
        self.pool.copy(plan.copies)
        if self.pool.states is not None:
            self.pool.states.restore(plan.restores)
        return self.tables.append(plan.pages)

    def close(self, slot: int, n_tokens: int = 0) -> None:
        """The sequence leaves, of which so many tokens are known."""
        self.tail.close(slot)
        if self._lengths is not None:
            self._lengths.close(slot, n_tokens)


def _is_known(plan: StepPlan) -> bool:
    """Whether its spans are as they say: none verifies drafts, nor does one before it that control has not heard of."""
    return plan.knows_starts and not any(plan.spans.n_drafts)
