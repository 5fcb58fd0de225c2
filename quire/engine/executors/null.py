"""The null device: runs every plan without a model, on a virtual clock, and refuses plans that contradict themselves.

Each K/V row of a group of layers is a digest of the token there and of all rows before it that the group's window
shows, *read back through the page table*; the next token is a digest of what it sees in all groups, and the seed. So a
wrong, stale, foreign or missing page, a missing copy or a wrong order changes the tokens, and `null_reference` says
what they should have been. Drafts are right or wrong by chance. Owns no policy; has no logits, so penalties and biases
have no meaning here. Its slots and pages: `null_pages.py`.
"""

from __future__ import annotations

import itertools
from concurrent.futures import Future

from quire.core.clock import VirtualClock
from quire.core.failure import Code
from quire.core.logprobs import PackedLogprobs
from quire.core.plan import SpanDrafts, StepMasks, StepPlan
from quire.core.request import Pooling
from quire.core.result import Fault, StepResult, StepTimings
from quire.engine.executors.digests import (
    NON_FINITE,
    ROW_BYTES,
    UNWRITTEN,
    State,
    allowed_ids,
    choose,
    guess,
    null_logprobs,
)
from quire.engine.executors.null_pages import NullPages, NullSlot, PlanError, require
from quire.planner.cost import CostModel


class NullExecutor(NullPages):
    """An Executor that computes each plan at once, inside `submit`; its clock moves by the cost model."""

    def __init__(
        self,
        *,
        n_pages: int,
        page_size: int,
        max_num_seqs: int,
        max_model_len: int,
        vocab_size: int,
        clock: VirtualClock,
        cost: CostModel | None = None,
        acceptance: float = 0.0,
        depth: int = 2,
        windows: tuple[int, ...] = (0,),
    ) -> None:
        """acceptance: the chance of a draft to be right. depth: steps in flight, for their host. windows: of each group
        of layers, as `KVLayout.windows`."""
        super().__init__(n_pages, page_size, max_num_seqs, max_model_len, windows)
        self.vocab_size = vocab_size
        self._clock, self._cost = clock, cost
        self._acceptance, self._depth = acceptance, depth
        self._last_step = -1
        self._unmasked: tuple[StepPlan, Future[StepResult]] | None = None
        self._drafts: dict[int, list[int]] = {}
        """Of the newest step's spans."""

    def prepare(self, _: StepPlan) -> None:
        """Nothing takes time here."""

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        """Execute `plan`. The future is done; it carries PlanError if the plan is inconsistent.

        The spans of a plan with `masked` ones are executed when its masks come.
        """
        require(self._unmasked is None, f"step {plan.step} is submitted before the masks of the step before it")
        future: Future[StepResult] = Future()
        try:
            self._begin(plan)
        except PlanError as error:
            future.set_exception(error)
        if plan.masked:
            self._unmasked = plan, future
        else:
            self._finish(plan, future, None)
        return future

    def drafts(self) -> Future[list[SpanDrafts]]:
        """Known at once."""
        future: Future[list[SpanDrafts]] = Future()
        plan = None if self._unmasked is None else self._unmasked[0]
        require(plan is not None and plan.masks_drafts, "drafts are asked for, and no step waits for their masks")
        spans = [] if plan is None else plan.masked
        future.set_result([SpanDrafts(self._drafts.get(span, [])) for span in spans])
        return future

    def mask(self, masks: StepMasks) -> None:
        """Execute the plan that waits for these."""
        if self._unmasked is None:
            raise PlanError(f"masks of step {masks.step}, but no step waits for any")
        (plan, future), self._unmasked = self._unmasked, None
        require(plan.step == masks.step, f"masks of step {masks.step} for step {plan.step}")
        self._finish(plan, future, masks)

    def _finish(self, plan: StepPlan, future: Future[StepResult], masks: StepMasks | None) -> None:
        if future.done():  # the plan was refused when it came
            return
        try:
            future.set_result(self._complete(plan, masks))
        except PlanError as error:
            future.set_exception(error)

    def shutdown(self) -> None:
        """Close every slot."""
        self._slots.clear()

    def fault(self, plan: StepPlan, row: int) -> Code | None:
        """A fault code to inject at span `row`, whose K/V then are garbage; None as a rule. For subclasses in tests."""
        return None

    def poison(self, plan: StepPlan, row: int) -> bool:
        """True makes the K/V of span `row` non-finite: seen only when a token is sampled from it or from what read it.

        Never as a rule; for subclasses in tests.
        """
        return False

    def execute(self, plan: StepPlan, masks: StepMasks | None = None) -> StepResult:
        """Close, open, append pages, copy, then all spans in order."""
        self._begin(plan)
        return self._complete(plan, masks)

    def _begin(self, plan: StepPlan) -> None:
        """All that does not depend on masks."""
        self._drafts = {}
        require(plan.step > self._last_step, f"step {plan.step} after step {self._last_step}")
        self._last_step = plan.step
        self.change(plan)
        columns = zip(plan.spans.slots, plan.spans.starts, plan.spans.n_drafts, strict=True)
        for row, (number, start, n_drafts) in enumerate(columns):
            if n_drafts:
                require(number in self._slots, f"span of slot {number}, which is not open")
                self._drafts[row] = self._guess(self._slots[number], self._start(plan, number, start), n_drafts)

    def _complete(self, plan: StepPlan, masks: StepMasks | None) -> StepResult:
        result = StepResult(plan.step)
        require(masks is not None or not plan.masked, "a plan with masked spans has no masks")
        self._run_spans(plan, result, {} if masks is None else self._allowed(plan.masked, masks))
        seconds = self._cost.step_s(plan.spans) if self._cost is not None else 0.0
        self._clock.advance(seconds)
        result.timings = StepTimings(0.0, seconds)
        return result

    def _allowed(self, masked: list[int], masks: StepMasks) -> dict[int, list[set[int]]]:
        """Span → ids that its masks allow: for its first token, and behind each of its drafts."""
        n_lines = [1 + len(self._drafts.get(span, [])) for span in masked]
        lines = allowed_ids(masks.bits, sum(n_lines), self.vocab_size)
        require(lines is not None, "masks of the wrong size")
        return {span: list(itertools.islice(lines or iter(()), n)) for span, n in zip(masked, n_lines, strict=True)}

    # ---- spans ---------------------------------------------------------------------------------------------------

    def _start(self, plan: StepPlan, number: int, start: int) -> int:
        """Where a span that is planned at `start` begins."""
        return self._slots[number].begin(start, 1 if plan.knows_starts else self._depth)

    def _guess(self, slot: NullSlot, start: int, most: int) -> list[int]:
        require(start < len(slot.tokens), f"drafts follow token {start}, {len(slot.tokens)} are known")
        states = [State(window, rows) for window, rows in zip(self.windows, self.rows_seen(slot, start), strict=True)]
        return guess(states, slot.params, slot.tokens[start], start, most, self.vocab_size, self._acceptance)

    def _run_spans(self, plan: StepPlan, result: StepResult, allowed: dict[int, list[set[int]]]) -> None:
        spans = plan.spans
        require(len(set(spans.slots)) == len(spans.slots), "a slot has two spans in one step")
        n_tokens = sum(spans.lengths)
        require(n_tokens == plan.n_tokens > 0, f"the plan says {plan.n_tokens} tokens, its spans have {n_tokens}")
        columns = zip(spans.slots, spans.starts, spans.lengths, spans.wants, spans.n_drafts, strict=True)
        for row, (number, start, length, wants, n_drafts) in enumerate(columns):
            require(number in self._slots, f"span of slot {number}, which is not open")
            slot = self._slots[number]
            start, code, poisoned = self._start(plan, number, start), self.fault(plan, row), self.poison(plan, row)
            if n_drafts:
                require(wants and length == 1 + n_drafts, f"slot {number} has {n_drafts} drafts in {length} tokens")
                length = 1  # that a fault leaves of it
                if code is None:
                    drafts, masks = self._drafts[row], allowed.get(row)
                    code = self._verify(number, slot, start, drafts, n_drafts, poisoned, masks, result)
                    if code is not None:
                        result.faults.append(Fault(number, code))
                    self.forget_unseen(number, slot)
                    continue
                result.n_drafted.append(0)
            states = self._compute(number, slot, start, length, garbage=code is not None, poisoned=poisoned)
            slot.hear(n_drafts, self._depth)
            if slot.params.prompt_logprobs >= 0 and start + 1 < slot.prompt_len:
                heard = slot.tokens[start + 1 : min(start + length + 1, slot.prompt_len)]
                n_top = slot.params.prompt_logprobs
                result.prompt_logprobs[row] = [null_logprobs(token, n_top, self.vocab_size) for token in heard]
            if slot.params.pooling is not None and code is None:
                code = self._pool(slot, row, start, length, result)
            if wants:
                is_finite = all(NON_FINITE not in rows for rows in self.rows_seen(slot, start + length))
                code = self._sample(
                    slot, start + length, states, result, code or (None if is_finite else Code.NON_FINITE_LOGITS),
                    allowed[row][0] if row in allowed else None,
                )  # fmt: skip
            if code is not None:
                result.faults.append(Fault(number, code))
            self.forget_unseen(number, slot)

    def _verify(
        self, number: int, slot: NullSlot, start: int, drafts: list[int], n_planned: int, poisoned: bool,
        allowed: list[set[int]] | None, result: StepResult,
    ) -> Code | None:  # fmt: skip
        """Write K/V for the drafts, and keep those that are right and one token more. allowed: behind each of them."""
        first, kept, is_right = len(slot.tokens), 0, True
        result.n_drafted.append(len(drafts))
        slot.tokens += drafts
        for at, position in enumerate(range(start, start + len(drafts) + 1)):
            states = self._compute(number, slot, position, 1, garbage=False, poisoned=poisoned)
            if not is_right:
                continue
            token = choose(states, slot.params, position + 1, self.vocab_size, None if allowed is None else allowed[at])
            is_finite = all(NON_FINITE not in rows for rows in self.rows_seen(slot, position + 1))
            if token is None or not is_finite:
                if kept:
                    is_right = False
                    continue
                slot.tokens[first:] = [0]
                slot.hear(n_planned, self._depth)
                result.n_new.append(0)
                return Code.EMPTY_MASK if token is None else Code.NON_FINITE_LOGITS
            if slot.params.logprobs >= 0:
                lines = null_logprobs(token, slot.params.logprobs, self.vocab_size)
                result.logprobs[len(result.tokens)] = PackedLogprobs.of([lines])
            result.tokens.append(token)
            kept += 1
            is_right = at < len(drafts) and token == drafts[at]
        slot.tokens[first:] = result.tokens[len(result.tokens) - kept :]
        slot.end = start + kept
        slot.hear(n_planned + 1 - kept, self._depth)
        result.n_new.append(kept)
        return None

    def _pool(self, slot: NullSlot, row: int, start: int, length: int, result: StepResult) -> Code | None:
        """The states of a token are its id and its position, so that sums and last ones can be told."""
        end = start + length
        if any(NON_FINITE in rows for rows in self.rows_seen(slot, end)):
            return Code.NON_FINITE_LOGITS
        if slot.params.pooling is Pooling.MEAN:
            result.pooled[row] = [float(sum(slot.tokens[start:end])), float(sum(range(start, end)))]
        elif end == slot.prompt_len:
            result.pooled[row] = [float(slot.tokens[end - 1]), float(end - 1)]
        return None

    def _compute(
        self, number: int, slot: NullSlot, start: int, length: int, *, garbage: bool, poisoned: bool
    ) -> list[State]:
        """Read all rows before `start` through the page tables, write rows [start, start+length) of each group."""
        end, size = start + length, self.page_size
        require(length > 0 and start >= 0, f"span [{start}, {end}) of slot {number} is empty")
        require(slot.end in (-1, start), f"slot {number} continues at {start}, it stood at {slot.end}")
        require(end <= len(slot.tokens), f"slot {number} reads token {end - 1}, {len(slot.tokens)} are known")
        before = self.rows_seen(slot, start)
        require(all(UNWRITTEN not in rows for rows in before), f"slot {number} reads K/V that was never written")
        poisoned |= any(NON_FINITE in rows for rows in before)
        states = [State(window, rows) for window, rows in zip(self.windows, before, strict=True)]
        for table, state in zip(slot.tables, states, strict=True):
            require(end <= len(table) * size, f"slot {number} writes beyond its {len(table)} pages")
            for index in range(start // size, -(-end // size)):
                self.check_exclusive(number, table[index], max(start, index * size))
            if garbage:
                state.spoil()
            for position in range(start, end):
                page, offset = table[position // size], position % size * ROW_BYTES
                row = NON_FINITE if poisoned else state.row(slot.tokens[position])
                self._rows[page][offset : offset + ROW_BYTES] = row
                state.add(row)
        slot.end = end
        return states

    def _sample(
        self,
        slot: NullSlot,
        position: int,
        states: list[State],
        result: StepResult,
        code: Code | None,
        allowed: set[int] | None,
    ) -> Code | None:
        """Append the token at `position` to the slot, and to the result unless there is a fault; returns its code."""
        require(position == len(slot.tokens), f"a token is wanted at {position}, {len(slot.tokens)} are known")
        token = choose(states, slot.params, position, self.vocab_size, allowed)
        slot.tokens.append(0 if token is None else token)
        result.n_new.append(0 if code or token is None else 1)
        if code is not None or token is None:
            return code or Code.EMPTY_MASK
        if slot.params.logprobs >= 0:
            lines = null_logprobs(token, slot.params.logprobs, self.vocab_size)
            result.logprobs[len(result.tokens)] = PackedLogprobs.of([lines])
        result.tokens.append(token)
        return None
