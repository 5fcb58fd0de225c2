"""The matchers of constrained sequences: compiled before a request is queued, advanced by committed tokens, asked for
the masks of the step that comes next.

Owns which sequence has which matcher. Does not own grammars (`text/grammar`) nor scheduling.
Invariants: a matcher has taken exactly the tokens that were committed for its sequence, so nothing is ever rolled back;
a matcher that fails, or that takes too long, ends its own sequence.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import logging
import os
import time
from collections.abc import Sequence

import numpy as np

from quire.control.scheduler import Scheduler
from quire.control.seq import Seq
from quire.core.errors import EngineError, QueueFull, QuireError, RequestError
from quire.core.events import FinishReason, SeqDelta
from quire.core.plan import StepMasks, StepPlan
from quire.core.request import Request
from quire.text.grammar import GrammarCompiler
from quire.text.matcher import Matcher, MatcherPool

logger = logging.getLogger("quire.engine")

MAX_COMPILING = 1024
FEW = 4
"""Fewer masks than these are made one by one."""
MASK_S = 0.002
"""What a mask may take on average. The masks of a step are made while its forward pass runs, but a slow one holds the
whole step up."""
SPARE_MASK_S = 0.25
"""What all masks of a sequence may take on top of that, or the masks of many steps together."""
TIMED_STEPS = 64
"""Steps whose masks are made one by one, each charged with its time, once masks made together took too long."""


def n_mask_threads() -> int:
    """Three quarters of the cores, up to 16."""
    return max(1, min(16, (os.cpu_count() or 1) * 3 // 4))


@dataclasses.dataclass(slots=True)
class _Live:
    """A sequence's matcher and the time that it has left."""

    matcher: Matcher
    spare_s: float = SPARE_MASK_S


class GrammarDesk:
    """Matchers of one engine. compiler None: it has no tokenizer, and constrained requests are refused."""

    def __init__(self, compiler: GrammarCompiler | None, n_threads: int = 0) -> None:
        """n_threads: for the masks of large steps."""
        self._compiler = compiler
        self._n_threads = n_threads or n_mask_threads()
        self._many: MatcherPool | None = None
        self._n_timed = 0
        """Steps that are still to be timed mask by mask."""
        self._excess_s = 0.0
        """How much longer than they may the masks of steps have taken of late."""
        self._pool: concurrent.futures.ThreadPoolExecutor | None = None
        self._compiling: dict[str, tuple[Request, concurrent.futures.Future[Matcher]]] = {}
        self._live: dict[str, dict[int, _Live]] = {}

    @property
    def n_compiling(self) -> int:
        """Requests whose grammar is being compiled."""
        return len(self._compiling)

    @property
    def n_live(self) -> int:
        """Sequences that have a matcher."""
        return sum(map(len, self._live.values()))

    def admit(self, request: Request) -> bool:
        """True if the request can be queued now; False if `ready` will say so once its grammar is compiled.

        RequestError if it never can be.
        """
        if self._compiler is None:
            raise RequestError("this engine has no tokenizer: output cannot be constrained", param="structured_outputs")
        found = self._compiler.cached(request.grammar)
        if found is not None:
            self._begin(request, found)
            return True
        if len(self._compiling) >= MAX_COMPILING:
            raise QueueFull(f"{len(self._compiling)} grammars wait to be compiled: try again later")
        if self._pool is None:
            self._pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="quire-grammar")
        self._compiling[request.request_id] = request, self._pool.submit(self._compiler.compile, request.grammar)
        return False

    def ready(self, wait_s: float) -> list[tuple[Request, QuireError | None]]:
        """Requests whose grammar is compiled, or is refused with an error; waits for the first up to `wait_s`."""
        futures = [future for _, future in self._compiling.values()]
        if futures and wait_s:
            concurrent.futures.wait(futures, wait_s, concurrent.futures.FIRST_COMPLETED)
        found: list[tuple[Request, QuireError | None]] = []
        for request_id, (request, future) in list(self._compiling.items()):
            if not future.done():
                continue
            del self._compiling[request_id]
            error = future.exception()
            if error is None:
                self._begin(request, future.result())
                found.append((request, None))
            else:
                if not isinstance(error, QuireError):
                    logger.error("a grammar could not be compiled", exc_info=error)
                    error = EngineError("the grammar could not be compiled")
                found.append((request, error))
        return found

    def drop(self, request_id: str) -> None:
        """The request is cancelled or was refused."""
        found = self._compiling.pop(request_id, None)
        if found is not None:
            found[1].cancel()
        self._live.pop(request_id, None)

    def drop_seq(self, request_id: str, index: int) -> None:
        """One sequence of a request has ended."""
        seqs = self._live.get(request_id, {})
        seqs.pop(index, None)
        if not seqs:
            self._live.pop(request_id, None)

    def masks(self, plan: StepPlan, seqs: Sequence[Seq]) -> StepMasks:
        """The masks of a plan whose earlier steps are all committed. seqs: of its spans.

        A sequence that has ended meanwhile, whose token nobody will take, may say anything.
        """
        owners = [seqs[span] for span in plan.masked]
        lives = [self._live.get(seq.request.request_id, {}).get(seq.index) for seq in owners]
        lines = [line for line, live in enumerate(lives) if live is not None]
        found = [live for live in lives if live is not None]
        bits = np.empty((len(lives), found[0].matcher.n_words if found else 1), "<i4")
        if len(found) < len(lives):
            bits[[line for line, live in enumerate(lives) if live is None]] = -1
        start_s = time.perf_counter()
        if self._n_timed or len(found) < FEW:
            self._n_timed = max(0, self._n_timed - 1)
            for line, live in zip(lines, found, strict=True):
                live.matcher.fill(bits[line])
                end_s = time.perf_counter()
                live.spare_s -= end_s - start_s - MASK_S
                start_s = end_s
        else:
            self._threads().fill([live.matcher for live in found], lines, bits)
            allowed_s = MASK_S * max(1.0, len(found) / (8 * self._n_threads))
            self._excess_s = max(0.0, self._excess_s + time.perf_counter() - start_s - allowed_s)
            if self._excess_s > SPARE_MASK_S:
                self._n_timed, self._excess_s = TIMED_STEPS, 0.0
        return StepMasks(plan.step, bits.reshape(-1).view(np.uint8).data)

    def follow(self, deltas: list[SeqDelta], scheduler: Scheduler) -> None:
        """Advance matchers by committed tokens. Ends sequences, in their delta and in the scheduler, that are complete
        or whose matcher failed."""
        for delta in deltas:
            live = self._live.get(delta.request_id, {}).get(delta.index)
            if live is None:
                continue
            reason, error = _advanced(live, delta)
            if reason is not None:
                scheduler.cancel_seq(delta.request_id, delta.index, reason)
                delta.finish_reason, delta.error = reason, error
            if delta.finish_reason is not None:
                self.drop_seq(delta.request_id, delta.index)

    def clear(self) -> None:
        """Every queued sequence has ended; those whose grammar is being compiled have not been queued."""
        self._live.clear()

    def _threads(self) -> MatcherPool:
        if self._many is None:
            self._many = MatcherPool(self._n_threads)
        return self._many

    def shutdown(self) -> None:
        """Stop compiling."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _begin(self, request: Request, matcher: Matcher) -> None:
        copies = [matcher, *(matcher.copy() for _ in range(1, request.params.n))]
        self._live[request.request_id] = {index: _Live(one) for index, one in enumerate(copies)}


def _advanced(live: _Live, delta: SeqDelta) -> tuple[FinishReason | None, str | None]:
    """Take the tokens of a delta; how the sequence ends by that, if it does, and the error if it is one."""
    if delta.finish_reason is FinishReason.ERROR:
        return None, None
    failed = bool(live.matcher.error)  # while its last mask was made: that allowed nothing but the end
    if delta.finish_reason is None:
        for token in delta.token_ids:
            failed |= not live.matcher.accept(token)
    if failed:
        text = live.matcher.error or "a token was not allowed"
        return FinishReason.ERROR, f"grammar_failed: the output cannot go on: {text}"
    if delta.finish_reason is not None:
        return None, None
    if live.spare_s < 0:
        return FinishReason.ERROR, "grammar_too_slow: the masks of this grammar take too long: simplify it"
    return (FinishReason.STOP, None) if live.matcher.is_complete else (None, None)
