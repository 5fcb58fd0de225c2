"""The null device: runs every plan without a model, on a virtual clock, and refuses plans that contradict themselves.

Each K/V row of a group of layers is a digest of the token there and of all rows before it that the group's window
shows, *read back through the page table*; the next token is a digest of what it sees in all groups, and the seed. So a
wrong, stale, foreign or missing page, a missing copy or a wrong order changes the tokens, and `null_reference` says
what they should have been. Drafts are right or wrong by chance. Owns no policy; has no logits, so penalties and biases
have no meaning here.
Invariant: a page that one open slot may still read is not written by another.
"""

from __future__ import annotations

from concurrent.futures import Future

from quire.config.kv import first_page
from quire.core.clock import VirtualClock
from quire.core.errors import EngineError
from quire.core.failure import Code
from quire.core.logprobs import PackedLogprobs
from quire.core.plan import PageAppend, PageCopy, SlotOpen, StepMasks, StepPlan
from quire.core.request import Pooling
from quire.core.result import Fault, StepResult, StepTimings
from quire.engine.executors.digests import (
    NON_FINITE,
    ROW_BYTES,
    UNWRITTEN,
    State,
    chance,
    choose,
    first_seen,
    null_logprobs,
)
from quire.planner.cost import CostModel


class PlanError(EngineError):
    """A plan contradicts itself or the plans before it."""

    code = Code.BAD_PLAN


class _Slot:
    """What the device keeps of an open slot."""

    __slots__ = ("end", "held_from", "params", "prompt_len", "rejected", "tables", "tokens")

    def __init__(self, opened: SlotOpen, n_groups: int) -> None:
        self.tokens = list(opened.token_ids)
        self.prompt_len = opened.prompt_len
        self.params = opened.params
        self.tables: list[list[int]] = [[] for _ in range(n_groups)]
        """The pages of each group; 0 before the first that was appended, and where none is seen any more."""
        self.held_from = [0] * n_groups
        """The first page of each table that is still seen."""
        self.end = -1
        """Tokens with K/V after its last span; -1 before its first."""
        self.rejected: list[int] = []
        """Drafts that its latest spans rejected, the last first: the host may not have heard of them."""

    def begin(self, planned: int, depth: int) -> int:
        """Where its next span begins, which the plan says as far as the host knows."""
        if self.end < 0:
            return planned
        unheard = {sum(self.rejected[:n]) for n in range(depth)}
        _require(planned - self.end in unheard, f"a span is planned at {planned}, the slot stands at {self.end}")
        return self.end

    def hear(self, n_rejected: int, depth: int) -> None:
        """Its newest span rejected so many drafts."""
        self.rejected = [n_rejected, *self.rejected][: depth - 1]


class NullExecutor:
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
        self.windows = windows
        self.n_pages, self.page_size = n_pages, page_size
        self.max_num_seqs, self.max_model_len, self.vocab_size = max_num_seqs, max_model_len, vocab_size
        self._clock, self._cost = clock, cost
        self._acceptance, self._depth = acceptance, depth
        self._rows = [bytearray(page_size * ROW_BYTES) for _ in range(n_pages)]
        self._holders: list[set[int]] = [set() for _ in range(n_pages)]
        """Open slots one of whose page tables has the page."""
        self._slots: dict[int, _Slot] = {}
        self._last_step = -1
        self._unmasked: tuple[StepPlan, Future[StepResult]] | None = None

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        """Execute `plan`. The future is done; it carries PlanError if the plan is inconsistent.

        A plan with `masked` spans is executed when its masks come.
        """
        _require(self._unmasked is None, f"step {plan.step} is submitted before the masks of the step before it")
        future: Future[StepResult] = Future()
        if plan.masked:
            self._unmasked = plan, future
        else:
            self._finish(plan, future, None)
        return future

    def mask(self, masks: StepMasks) -> None:
        """Execute the plan that waits for these."""
        if self._unmasked is None:
            raise PlanError(f"masks of step {masks.step}, but no step waits for any")
        (plan, future), self._unmasked = self._unmasked, None
        _require(plan.step == masks.step, f"masks of step {masks.step} for step {plan.step}")
        self._finish(plan, future, masks)

    def _finish(self, plan: StepPlan, future: Future[StepResult], masks: StepMasks | None) -> None:
        try:
            future.set_result(self.execute(plan, masks))
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
        _require(plan.step > self._last_step, f"step {plan.step} after step {self._last_step}")
        self._last_step = plan.step
        for slot in plan.closed:
            self._close(slot, known=len(plan.closed) < self.max_num_seqs)
        for opened in plan.opened:
            self._open(opened)
        for append in plan.pages:
            self._append(append)
        self._copy(plan.copies)
        result = StepResult(plan.step)
        self._run_spans(plan, result, _allowed(plan, masks, self.vocab_size))
        seconds = self._cost.step_s(plan.spans) if self._cost is not None else 0.0
        self._clock.advance(seconds)
        result.timings = StepTimings(0.0, seconds)
        return result

    # ---- deltas --------------------------------------------------------------------------------------------------

    def _close(self, slot: int, *, known: bool) -> None:
        """known: the host says that it is open; False when it closes every slot after a failure."""
        _require(slot in self._slots or not known, f"slot {slot} is closed but was not open")
        if slot in self._slots:
            for page in (page for table in self._slots.pop(slot).tables for page in table):
                self._holders[page].discard(slot)

    def _open(self, opened: SlotOpen) -> None:
        _require(0 <= opened.slot < self.max_num_seqs, f"slot {opened.slot} does not exist")
        _require(opened.slot not in self._slots, f"slot {opened.slot} is opened while it is open")
        _require(0 < opened.prompt_len <= len(opened.token_ids) < self.max_model_len, "a slot opens with bad lengths")
        self._slots[opened.slot] = _Slot(opened, len(self.windows))

    def _append(self, append: PageAppend) -> None:
        _require(append.slot in self._slots, f"pages for slot {append.slot}, which is not open")
        _require(0 <= append.group < len(self.windows), f"pages for group {append.group}, which is not there")
        slot = self._slots[append.slot]
        table, window = slot.tables[append.group], self.windows[append.group]
        if window and not table:
            table += [0] * append.first_index
        _require(append.first_index == len(table), "pages are not appended at the end of the table")
        _require(all(0 < page < self.n_pages for page in append.pages), f"page ids {append.pages} out of range")
        table += append.pages
        for page in append.pages:
            _require(append.slot not in self._holders[page], f"slot {append.slot} has a page twice")
            self._holders[page].add(append.slot)

    def _forget_unseen(self, number: int, slot: _Slot) -> None:
        """Pages behind every later token are the slot's no more: others may have them."""
        for group, window in enumerate(self.windows):
            table, first = slot.tables[group], first_page(window, slot.end, self.page_size)
            for index in range(slot.held_from[group], first):
                self._holders[table[index]].discard(number)
                table[index] = 0
            slot.held_from[group] = first

    def _copy(self, copies: list[PageCopy]) -> None:
        """Copies of one plan may run in any order, so no page is both read and written."""
        targets = [copy.target for copy in copies]
        _require(len(set(targets)) == len(targets), "a page is the target of two copies")
        for copy in copies:
            _require(copy.source not in targets, f"page {copy.source} is both source and target of copies")
            _require(copy.source > 0 and copy.target > 0, "the dummy page is copied")
            _require(0 < copy.n_tokens <= self.page_size, f"{copy.n_tokens} rows of a page are copied")
            rows = self._rows[copy.source][: copy.n_tokens * ROW_BYTES]
            _require(UNWRITTEN not in rows, f"rows of page {copy.source} are copied that were never written")
            for holder in self._holders[copy.target]:
                _require(self._slots[holder].end < 0, f"page {copy.target} is overwritten while slot {holder} uses it")
            self._rows[copy.target][: len(rows)] = rows

    # ---- spans ---------------------------------------------------------------------------------------------------

    def _run_spans(self, plan: StepPlan, result: StepResult, allowed: dict[int, set[int]]) -> None:
        spans = plan.spans
        _require(len(set(spans.slots)) == len(spans.slots), "a slot has two spans in one step")
        n_tokens = sum(spans.lengths)
        _require(n_tokens == plan.n_tokens > 0, f"the plan says {plan.n_tokens} tokens, its spans have {n_tokens}")
        columns = zip(spans.slots, spans.starts, spans.lengths, spans.wants, spans.n_drafts, strict=True)
        for row, (number, start, length, wants, n_drafts) in enumerate(columns):
            _require(number in self._slots, f"span of slot {number}, which is not open")
            slot = self._slots[number]
            depth = 1 if plan.knows_starts else self._depth
            start, code, poisoned = slot.begin(start, depth), self.fault(plan, row), self.poison(plan, row)
            if n_drafts:
                _require(wants and length == 1 + n_drafts, f"slot {number} has {n_drafts} drafts in {length} tokens")
                length = 1  # that a fault leaves of it
                if code is None:
                    code = self._verify(number, slot, start, n_drafts, poisoned, result)
                    if code is not None:
                        result.faults.append(Fault(number, code))
                    self._forget_unseen(number, slot)
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
                is_finite = all(NON_FINITE not in rows for rows in self._rows_seen(slot, start + length))
                code = self._sample(
                    slot, start + length, states, result, code or (None if is_finite else Code.NON_FINITE_LOGITS),
                    allowed.get(row),
                )  # fmt: skip
            if code is not None:
                result.faults.append(Fault(number, code))
            self._forget_unseen(number, slot)

    def _verify(
        self, number: int, slot: _Slot, start: int, n_drafts: int, poisoned: bool, result: StepResult
    ) -> Code | None:
        """Guess up to `n_drafts` tokens, write K/V for them, and keep those that are right and one more."""
        first, kept, is_right = len(slot.tokens), 0, True
        n_made = n_drafts if chance(slot.params, start + 1_000_003) < self._acceptance else n_drafts // 2
        result.n_drafted.append(n_made)
        for position in range(start, start + n_made + 1):
            states = self._compute(number, slot, position, 1, garbage=False, poisoned=poisoned)
            token = choose(states, slot.params, position + 1, self.vocab_size)
            if token is None or any(NON_FINITE in rows for rows in self._rows_seen(slot, position + 1)):
                if kept:
                    break
                slot.tokens[first:] = [0]
                slot.hear(n_drafts, self._depth)
                result.n_new.append(0)
                return Code.EMPTY_MASK if token is None else Code.NON_FINITE_LOGITS
            if is_right:
                if slot.params.logprobs >= 0:
                    lines = null_logprobs(token, slot.params.logprobs, self.vocab_size)
                    result.logprobs[len(result.tokens)] = PackedLogprobs.of([lines])
                result.tokens.append(token)
                kept += 1
            is_right = is_right and chance(slot.params, position) < self._acceptance
            slot.tokens.append(token if is_right else (token + 1) % self.vocab_size)
        del slot.tokens[first:]
        slot.tokens += result.tokens[len(result.tokens) - kept :]
        slot.end = start + kept
        slot.hear(n_drafts + 1 - kept, self._depth)
        result.n_new.append(kept)
        return None

    def _pool(self, slot: _Slot, row: int, start: int, length: int, result: StepResult) -> Code | None:
        """The states of a token are its id and its position, so that sums and last ones can be told."""
        end = start + length
        if any(NON_FINITE in rows for rows in self._rows_seen(slot, end)):
            return Code.NON_FINITE_LOGITS
        if slot.params.pooling is Pooling.MEAN:
            result.pooled[row] = [float(sum(slot.tokens[start:end])), float(sum(range(start, end)))]
        elif end == slot.prompt_len:
            result.pooled[row] = [float(slot.tokens[end - 1]), float(end - 1)]
        return None

    def _rows_of(self, slot: _Slot, group: int, end: int) -> bytes:
        """K/V that token number `end` sees before it in a group, read through the page table."""
        first, size = first_seen(self.windows[group], end), self.page_size
        at = first // size
        pages = slot.tables[group][at : -(-end // size)]
        _require(0 not in pages, "K/V is read in a page that was never there, or was given back")
        rows = b"".join([self._rows[page] for page in pages])
        return rows[(first - at * size) * ROW_BYTES : (end - at * size) * ROW_BYTES]

    def _rows_seen(self, slot: _Slot, end: int) -> list[bytes]:
        return [self._rows_of(slot, group, end) for group in range(len(self.windows))]

    def _compute(
        self, number: int, slot: _Slot, start: int, length: int, *, garbage: bool, poisoned: bool
    ) -> list[State]:
        """Read all rows before `start` through the page tables, write rows [start, start+length) of each group."""
        end, size = start + length, self.page_size
        _require(length > 0 and start >= 0, f"span [{start}, {end}) of slot {number} is empty")
        _require(slot.end in (-1, start), f"slot {number} continues at {start}, it stood at {slot.end}")
        _require(end <= len(slot.tokens), f"slot {number} reads token {end - 1}, {len(slot.tokens)} are known")
        before = self._rows_seen(slot, start)
        _require(all(UNWRITTEN not in rows for rows in before), f"slot {number} reads K/V that was never written")
        poisoned |= any(NON_FINITE in rows for rows in before)
        states = [State(window, rows) for window, rows in zip(self.windows, before, strict=True)]
        for table, state in zip(slot.tables, states, strict=True):
            _require(end <= len(table) * size, f"slot {number} writes beyond its {len(table)} pages")
            for index in range(start // size, -(-end // size)):
                self._check_exclusive(number, table[index], max(start, index * size))
            if garbage:
                state.spoil()
            for position in range(start, end):
                page, offset = table[position // size], position % size * ROW_BYTES
                row = NON_FINITE if poisoned else state.row(slot.tokens[position])
                self._rows[page][offset : offset + ROW_BYTES] = row
                state.add(row)
        slot.end = end
        return states

    def _check_exclusive(self, number: int, page: int, first: int) -> None:
        """Nobody else may have used the K/V of `page` from position `first` on."""
        for other in self._holders[page]:
            used = self._slots[other].end
            _require(other == number or used <= first, f"slot {number} writes page {page}, which slot {other} shares")

    def _sample(
        self,
        slot: _Slot,
        position: int,
        states: list[State],
        result: StepResult,
        code: Code | None,
        allowed: set[int] | None,
    ) -> Code | None:
        """Append the token at `position` to the slot, and to the result unless there is a fault; returns its code."""
        _require(position == len(slot.tokens), f"a token is wanted at {position}, {len(slot.tokens)} are known")
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


def _allowed(plan: StepPlan, masks: StepMasks | None, vocab_size: int) -> dict[int, set[int]]:
    """Span → ids that its mask allows."""
    if masks is None:
        _require(not plan.masked, "a plan with masked spans has no masks")
        return {}
    n_bytes = len(masks.bits) // len(plan.masked)
    _require(n_bytes % 4 == 0 and n_bytes * len(plan.masked) == len(masks.bits), "masks of the wrong size")
    return {
        span: {t for t in range(min(vocab_size, 8 * n_bytes)) if masks.bits[at * n_bytes + t // 8] >> t % 8 & 1}
        for at, span in enumerate(plan.masked)
    }


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise PlanError(message)
