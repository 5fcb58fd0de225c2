"""The matchers of constrained sequences: compiled before a request is queued, advanced by committed tokens, asked for
the masks of the step that comes next.

Owns which sequence has which matcher. Does not own grammars (`text/grammar`) nor scheduling.
Invariants: a matcher has taken exactly the tokens that were committed for its sequence, so nothing is ever rolled back;
a matcher that fails, or that takes too long, ends its own sequence.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
import logging
import os
import time
from collections.abc import Sequence

from quire.control.scheduler import Scheduler
from quire.control.seq import Seq
from quire.core.errors import EngineError, QueueFull, QuireError, RequestError
from quire.core.events import FinishReason, SeqDelta
from quire.core.plan import StepMasks, StepPlan
from quire.core.request import Request
from quire.text.grammar import GrammarCompiler, Matcher

logger = logging.getLogger("quire.engine")

MAX_COMPILING = 1024
PARALLEL_BYTES = 1 << 19
"""Masks of a step, together, above which they are made in several threads: 32 of a vocabulary of 128 Ki take a
millisecond in one."""
MASK_S = 0.002
"""What a mask may take on average. The masks of a step are made while its forward pass runs, but a slow one holds the
whole step up."""
SPARE_MASK_S = 0.25
"""What all masks of a sequence may take on top of that."""


@dataclasses.dataclass(slots=True)
class _Live:
    """A sequence's matcher and the time that it has left."""

    matcher: Matcher
    spare_s: float = SPARE_MASK_S


class GrammarDesk:
    """Matchers of one engine. compiler None: it has no tokenizer, and constrained requests are refused."""

    def __init__(self, compiler: GrammarCompiler | None, n_threads: int = 0) -> None:
        """n_threads: for the masks of large steps; 0 takes half of the cores, up to 4."""
        self._compiler = compiler
        self._n_threads = n_threads or max(1, min(4, (os.cpu_count() or 1) // 2))
        self._mask_pool: concurrent.futures.ThreadPoolExecutor | None = None
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

    def masks(self, plan: StepPlan, seqs: Sequence[Seq], n_bytes: int) -> StepMasks:
        """The masks of a plan whose earlier steps are all committed. seqs: of its spans; n_bytes: of one mask.

        A sequence that has ended meanwhile, whose token nobody will take, may say anything.
        """
        owners = [seqs[span] for span in plan.masked]
        lives = [self._live.get(seq.request.request_id, {}).get(seq.index) for seq in owners]
        n_slices = self._n_threads if len(lives) * n_bytes >= PARALLEL_BYTES else 1
        if n_slices == 1:
            return StepMasks(plan.step, b"".join(_masks_of(lives, n_bytes)))
        rows: list[bytes] = [b""] * len(lives)
        slices = [lives[at::n_slices] for at in range(n_slices)]
        for at, made in enumerate(self._threads().map(_masks_of, slices, itertools.repeat(n_bytes))):
            rows[at::n_slices] = made
        return StepMasks(plan.step, b"".join(rows))

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

    def _threads(self) -> concurrent.futures.ThreadPoolExecutor:
        if self._mask_pool is None:
            self._mask_pool = concurrent.futures.ThreadPoolExecutor(self._n_threads, thread_name_prefix="quire-mask")
        return self._mask_pool

    def shutdown(self) -> None:
        """Stop compiling."""
        if self._mask_pool is not None:
            self._mask_pool.shutdown(wait=False)
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _begin(self, request: Request, matcher: Matcher) -> None:
        copies = [matcher, *(matcher.copy() for _ in range(1, request.params.n))]
        self._live[request.request_id] = {index: _Live(one) for index, one in enumerate(copies)}


def _masks_of(lives: Sequence[_Live | None], n_bytes: int) -> list[bytes]:
    """Their masks, each charged with its time; None may say anything."""
    rows = []
    for live in lives:
        if live is None:
            rows.append(b"\xff" * n_bytes)
            continue
        start_s = time.perf_counter()
        rows.append(live.matcher.mask())
        live.spare_s -= time.perf_counter() - start_s - MASK_S
    return rows


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
