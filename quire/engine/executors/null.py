"""The null device: runs every plan without a model, on a virtual clock, and refuses plans that contradict themselves.

Each K/V row is a digest of the token there and of all rows before it, *read back through the page table*; the next
token is a digest of all rows and the seed. So a wrong, stale, foreign or missing page, a missing copy or a wrong order
changes the tokens, and `null_reference` says what they should have been. Drafts are right or wrong by chance. Owns no
policy; has no logits, so penalties and biases have no meaning here.
Invariant: a page that one open slot has read is not written by another.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from concurrent.futures import Future

from quire.core.clock import VirtualClock
from quire.core.errors import EngineError
from quire.core.failure import Code
from quire.core.plan import PageAppend, PageCopy, SlotOpen, SlotParams, StepMasks, StepPlan
from quire.core.request import Pooling
from quire.core.result import Fault, StepResult, StepTimings, TokenLogprobs
from quire.planner.cost import CostModel

ROW_BYTES = 8
UNWRITTEN = bytes(ROW_BYTES)
"""Every written row has a first byte that is not 0, so eight zero bytes never occur in written rows."""
NON_FINITE = b"\xff" * ROW_BYTES
"""A row that is not a number; whatever is computed from it is not one either."""


class PlanError(EngineError):
    """A plan contradicts itself or the plans before it."""

    code = Code.BAD_PLAN


class _Slot:
    """What the device keeps of an open slot."""

    __slots__ = ("end", "pages", "params", "prompt_len", "rejected", "tokens")

    def __init__(self, opened: SlotOpen) -> None:
        self.tokens = list(opened.token_ids)
        self.prompt_len = opened.prompt_len
        self.params = opened.params
        self.pages: list[int] = []
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
    ) -> None:
        """acceptance: the chance of a draft to be right. depth: steps in flight, for their host."""
        self.n_pages, self.page_size = n_pages, page_size
        self.max_num_seqs, self.max_model_len, self.vocab_size = max_num_seqs, max_model_len, vocab_size
        self._clock, self._cost = clock, cost
        self._acceptance, self._depth = acceptance, depth
        self._rows = [bytearray(page_size * ROW_BYTES) for _ in range(n_pages)]
        self._holders: list[set[int]] = [set() for _ in range(n_pages)]
        """Open slots whose page table has the page."""
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
            for page in self._slots.pop(slot).pages:
                self._holders[page].discard(slot)

    def _open(self, opened: SlotOpen) -> None:
        _require(0 <= opened.slot < self.max_num_seqs, f"slot {opened.slot} does not exist")
        _require(opened.slot not in self._slots, f"slot {opened.slot} is opened while it is open")
        _require(0 < opened.prompt_len <= len(opened.token_ids) < self.max_model_len, "a slot opens with bad lengths")
        self._slots[opened.slot] = _Slot(opened)

    def _append(self, append: PageAppend) -> None:
        _require(append.slot in self._slots, f"pages for slot {append.slot}, which is not open")
        slot = self._slots[append.slot]
        _require(append.first_index == len(slot.pages), "pages are not appended at the end of the table")
        _require(all(0 < page < self.n_pages for page in append.pages), f"page ids {append.pages} out of range")
        slot.pages += append.pages
        _require(len(set(slot.pages)) == len(slot.pages), f"slot {append.slot} has a page twice")
        for page in append.pages:
            self._holders[page].add(append.slot)

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
            start, code, poisoned = slot.begin(start, self._depth), self.fault(plan, row), self.poison(plan, row)
            if n_drafts:
                _require(wants and length == 1 + n_drafts, f"slot {number} has {n_drafts} drafts in {length} tokens")
                length = 1  # that a fault leaves of it
                if code is None:
                    code = self._verify(number, slot, start, n_drafts, poisoned, result)
                    if code is not None:
                        result.faults.append(Fault(number, code))
                    continue
            state = self._compute(number, slot, start, length, garbage=code is not None, poisoned=poisoned)
            slot.hear(0, self._depth)
            if slot.params.prompt_logprobs >= 0 and start + 1 < slot.prompt_len:
                heard = slot.tokens[start + 1 : min(start + length + 1, slot.prompt_len)]
                n_top = slot.params.prompt_logprobs
                result.prompt_logprobs[row] = [null_logprobs(token, n_top, self.vocab_size) for token in heard]
            if slot.params.pooling is not None and code is None:
                code = self._pool(slot, row, start, length, result)
            if wants:
                is_finite = NON_FINITE not in self._rows_of(slot, start + length)
                code = self._sample(
                    slot, start + length, state, result, code or (None if is_finite else Code.NON_FINITE_LOGITS),
                    allowed.get(row),
                )  # fmt: skip
            if code is not None:
                result.faults.append(Fault(number, code))

    def _verify(
        self, number: int, slot: _Slot, start: int, n_drafts: int, poisoned: bool, result: StepResult
    ) -> Code | None:
        """Guess `n_drafts` tokens, write K/V for all of them, and keep those that are right and one more."""
        first, kept, is_right = len(slot.tokens), 0, True
        for position in range(start, start + n_drafts + 1):
            state = self._compute(number, slot, position, 1, garbage=False, poisoned=poisoned)
            token = _choose(state, slot.params, position + 1, self.vocab_size)
            if token is None or NON_FINITE in self._rows_of(slot, position + 1):
                del slot.tokens[first:]
                result.n_new.append(0)
                return Code.EMPTY_MASK if token is None else Code.NON_FINITE_LOGITS
            if is_right:
                result.tokens.append(token)
                kept += 1
            is_right = is_right and _chance(slot.params, position) < self._acceptance
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
        if NON_FINITE in self._rows_of(slot, end):
            return Code.NON_FINITE_LOGITS
        if slot.params.pooling is Pooling.MEAN:
            result.pooled[row] = [float(sum(slot.tokens[start:end])), float(sum(range(start, end)))]
        elif end == slot.prompt_len:
            result.pooled[row] = [float(slot.tokens[end - 1]), float(end - 1)]
        return None

    def _rows_of(self, slot: _Slot, end: int) -> bytes:
        """K/V of the first `end` tokens, read through the page table."""
        return b"".join(self._rows[page] for page in slot.pages[: -(-end // self.page_size)])[: end * ROW_BYTES]

    def _compute(
        self, number: int, slot: _Slot, start: int, length: int, *, garbage: bool, poisoned: bool
    ) -> hashlib.blake2b:
        """Read all rows before `start` through the page table, write rows [start, start+length)."""
        end, size = start + length, self.page_size
        _require(length > 0 and start >= 0, f"span [{start}, {end}) of slot {number} is empty")
        _require(slot.end in (-1, start), f"slot {number} continues at {start}, it stood at {slot.end}")
        _require(end <= len(slot.tokens), f"slot {number} reads token {end - 1}, {len(slot.tokens)} are known")
        _require(end <= len(slot.pages) * size, f"slot {number} writes beyond its {len(slot.pages)} pages")
        before = self._rows_of(slot, start)
        _require(UNWRITTEN not in before, f"slot {number} reads K/V that was never written")
        for index in range(start // size, -(-end // size)):
            self._check_exclusive(number, slot.pages[index], max(start, index * size))
        state = hashlib.blake2b(before, digest_size=ROW_BYTES)
        poisoned |= NON_FINITE in before
        if garbage:
            state.update(b"garbage")
        for position in range(start, end):
            page, offset = slot.pages[position // size], position % size * ROW_BYTES
            row = NON_FINITE if poisoned else _kv_row(state, slot.tokens[position])
            self._rows[page][offset : offset + ROW_BYTES] = row
            state.update(row)
        slot.end = end
        return state

    def _check_exclusive(self, number: int, page: int, first: int) -> None:
        """Nobody else may have used the K/V of `page` from position `first` on."""
        for other in self._holders[page]:
            used = self._slots[other].end
            _require(other == number or used <= first, f"slot {number} writes page {page}, which slot {other} shares")

    def _sample(
        self,
        slot: _Slot,
        position: int,
        state: hashlib.blake2b,
        result: StepResult,
        code: Code | None,
        allowed: set[int] | None,
    ) -> Code | None:
        """Append the token at `position` to the slot, and to the result unless there is a fault; returns its code."""
        _require(position == len(slot.tokens), f"a token is wanted at {position}, {len(slot.tokens)} are known")
        token = _choose(state, slot.params, position, self.vocab_size, allowed)
        slot.tokens.append(0 if token is None else token)
        result.n_new.append(0 if code or token is None else 1)
        if code is not None or token is None:
            return code or Code.EMPTY_MASK
        if slot.params.logprobs >= 0:
            result.logprobs[len(result.tokens)] = null_logprobs(token, slot.params.logprobs, self.vocab_size)
        result.tokens.append(token)
        return None


def null_reference(prompt: Sequence[int], params: SlotParams, n_tokens: int, vocab_size: int) -> list[int]:
    """The tokens that the null device must produce after `prompt`, computed alone, in order, without pages.

    `n_tokens` of them, or fewer if the masks leave nothing to choose.
    """
    state = hashlib.blake2b(digest_size=ROW_BYTES)
    tokens = list(prompt)
    for known in prompt:
        state.update(_kv_row(state, known))
    while len(tokens) < len(prompt) + n_tokens:
        token = _choose(state, params, len(tokens), vocab_size)
        if token is None:
            break
        tokens.append(token)
        state.update(_kv_row(state, token))
    return tokens[len(prompt) :]


def null_logprobs(token: int, n_top: int, vocab_size: int) -> TokenLogprobs:
    """The row that the null device reports for any token: made up, but a function of the token."""
    top_ids = [(token + i) % vocab_size for i in range(n_top)]
    return TokenLogprobs(-0.5 - token / vocab_size, 1, top_ids, [-0.5 - token / vocab_size - i for i in range(n_top)])


def _chance(params: SlotParams, position: int) -> float:
    """In [0, 1), by seed and position."""
    digest = hashlib.blake2b(struct.pack("<QQ", params.seed, position), digest_size=4, person=b"draft").digest()
    return int.from_bytes(digest, "little") / 2**32


def _kv_row(state: hashlib.blake2b, token: int) -> bytes:
    """K/V of a token after everything in `state`; the first byte is never 0."""
    digest = state.copy()
    digest.update(token.to_bytes(8, "little"))
    row = digest.digest()
    return bytes((row[0] | 1,)) + row[1:]


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


def _choose(
    state: hashlib.blake2b, params: SlotParams, position: int, vocab_size: int, allowed: set[int] | None = None
) -> int | None:
    """The token at `position`: a function of all rows before it, the seed and the position; None if all are masked."""
    digest = state.copy()
    digest.update(struct.pack("<QQ", params.seed, position))
    number = int.from_bytes(digest.digest(), "little")
    ids: Sequence[int] = params.allowed_token_ids or range(vocab_size)
    masked = set(params.masked_end_ids) if position < params.masked_until else set()
    for i in range(len(ids)):
        token = ids[(number + i) % len(ids)]
        if token not in masked and (allowed is None or token in allowed):
            return token
    return None


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise PlanError(message)
