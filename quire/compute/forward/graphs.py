"""CUDA graphs of a step: the forward (tokens to states) by number of rows, sampling (states to new tokens) by sampled
rows.

Owns the buckets and the memory through which a step reaches them: one copy from the host, at most two launches. Those
of the region that it is made in are captured before the first step; those of the other one, and sampling from a part of
the vocabulary, as steps want them.
Does not own what sampling does (`runner/tail`).
Invariants: a replay's rows equal the eager step's; padding rows attend to nothing, write to page 0 and the spare slot.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import torch

from quire.compute.device.cuda import CudaDevice
from quire.compute.forward.adapted_rows import AdaptedRows
from quire.compute.forward.buckets import (
    MOST_VERIFYING,
    NOTHING,
    Captures,
    ForwardGraphs,
    mixed_sizes,
    most_large_lines,
)
from quire.compute.forward.sampled_rows import PLAIN, SampledRows
from quire.compute.forward.staged_rows import StagedRows
from quire.compute.models.decoder import Decoder
from quire.compute.models.sent_rows import compute_for_others, exchange_of
from quire.compute.runner import standing
from quire.compute.runner.batch_builder import FlatBatch
from quire.compute.runner.pool import KVPool, PagedContext, plan_attention
from quire.compute.runner.spans_apart import MOST_KEYS, Room, apart
from quire.compute.runner.step import States, Step
from quire.compute.runner.tables import SlotTables
from quire.compute.runner.tail import Tail
from quire.kernels.attention import op as attention
from quire.kernels.attention.schedule.plan import AttnPlan, PlanBuffers, SharedPrefix
from quire.kernels.attention.schedule.tiles import small_rows_of
from quire.kernels.invariance import are_rows_alone
from quire.kernels.state import single_rows
from quire.planner.captured import decode_sizes

logger = logging.getLogger("quire.engine")

STAGING_BYTES: Final = 8 << 20
AGAIN_BYTES: Final = 1 << 30
"""Reads of K and V for the rows of a span after its first, each of which reads them anew, from which on a mixed bucket
is faster: 0.2 ms."""
FOLLOWING_AGAIN_BYTES: Final = 8 << 30
"""The same for a step that follows the newest one on the device, where a mixed bucket could not: it would have to wait
until the host has heard of that one, which takes 1 to 3 ms. Rows of a span run together, and most reads are the
cache's."""
SHARING_PAYS_BYTES: Final = 1 << 30
"""Reads of K and V that shared prefixes must save in a step before it takes a mixed bucket, whose extra launches cost
0.1 to 0.2 ms."""


_ByKind = dict[tuple[bool, bool], Captures | None]
_KINDS: Final = {False: "deterministic requests", True: "adapters"}


class GraphForward:
    """Decode forwards for steps of one row a span, mixed forwards for other steps of few enough rows, and sampling."""

    def __init__(
        self,
        device: CudaDevice,
        model: Decoder,
        pool: KVPool,
        tables: SlotTables,
        tail: Tail,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_sampled: int = 0,
        verifies: bool = False,
    ) -> None:
        """max_sampled: rows that a step chooses tokens of; 0: one for each sequence. verifies: some are drafts."""
        max_sampled, arch = max_sampled or max_num_seqs, model.arch
        self._device, self._model, self._pool, self._tables = device, model, pool, tables
        self._tail = tail
        self._max_num_seqs = max_num_seqs
        self._exchange = exchange_of(model)
        self.common_sizes: Sequence[int] = decode_sizes(max_num_seqs)
        # where spans of a model with states end is the host's to say; ranks that send rows share decode steps alone
        is_decode_only = pool.states is not None or self._exchange is not None
        self._mixed_sizes = [] if is_decode_only else mixed_sizes(arch, max_num_batched_tokens, max_num_seqs)
        self._verifying_sizes = decode_sizes(min(max_sampled, MOST_VERIFYING)) if verifies else []
        n_rows = max([max_sampled, *self._mixed_sizes])
        self._staging = device.staging(STAGING_BYTES * len(pool.windows))
        self._sampling = SampledRows(device, self._staging, model, tables, tail, max_sampled)
        self._n_groups = len(pool.layout.groups)
        self._staged_rows = StagedRows(self._staging, tables, self._n_groups, n_rows)
        self._adapted = None if model.adapters is None else AdaptedRows(self._staging, model.adapters, n_rows)
        self._hidden = device.zeros((n_rows, arch.hidden_size), model.stream_dtype)
        self._captures: _ByKind = {(are_rows_alone(), False): self._new_captures(adapted=False)}
        """By whether rows are alone in them, and whether some have adapters."""

    def _new_captures(self, *, adapted: bool) -> Captures:
        most, sizes, mixed = self._max_num_seqs, self._verifying_sizes, NOTHING
        if self._mixed_sizes:
            most_large = most_large_lines(self._pool.group, most, self._mixed_sizes[-1])
            buffers = self._buffers(most, self._mixed_sizes[-1], most_large)
            mixed = ForwardGraphs(self._mixed_sizes, buffers, Room(most, most_large))
        verifying = ForwardGraphs(sizes, self._buffers(sizes[-1]), Room(sizes[-1])) if sizes else NOTHING
        decode = ForwardGraphs(decode_sizes(most), self._buffers(most), Room(most))
        return Captures(decode, mixed, verifying, adapted=adapted)

    def _buffers(self, max_num_seqs: int, mixed_rows: int = 0, max_large: int = 0) -> list[PlanBuffers]:
        """For decode: one row a span, which is a large line if heads are many; for mixed steps any spans, with room for
        prefixes that are shared. A step uses one of both, so they have one memory; in it kinds of windows lie one
        behind the other."""
        if not self._pool.layout.n_lanes:
            return []
        like, found, n_ints = plan_attention(self._pool, self._tables, *self._idle(1))[0], list[PlanBuffers](), 0
        group = self._pool.group
        max_large = max_large if group <= small_rows_of(group) else max(max_large, max_num_seqs)
        for _ in self._pool.windows:
            memory = self._staging.rest(torch.int32, n_ints)
            buffers = attention.plan_buffers(
                like, max_num_seqs, span_tokens=int(are_rows_alone()) if mixed_rows else 1, max_large=max_large,
                max_rows=mixed_rows or max_num_seqs, max_keys=MOST_KEYS, memory=memory,
            )  # fmt: skip
            n_ints += buffers.n_ints
            found.append(buffers)
        return found

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture every bucket, largest first, so that smaller ones reuse its memory."""
        if self._adapted is None or not are_rows_alone():  # else all steps are as those with adapters
            self._capture_all(adapted=False)
        if self._adapted is not None:
            self._capture_all(adapted=True)

    def _capture_all(self, *, adapted: bool) -> None:
        start_s, captures = time.perf_counter(), self._captures_now(adapted=adapted)
        if captures is None:
            return
        for forwards in (captures.decode, captures.mixed, captures.verifying):
            for size in reversed(forwards.sizes):
                self._replay(captures, forwards, size)
        sampling = self._sampling.sizes if self._model.range.is_last else []
        for size in reversed(sampling):
            self._sampling.replay(captures.sampling, (size, PLAIN), self._hidden)
        sizes = captures.decode.sizes + captures.verifying.sizes
        counts = len(sizes), len(captures.mixed.sizes), len(sampling)
        took_s = time.perf_counter() - start_s
        logger.info("graphs: %d decode, %d mixed, %d sampling captured in %.1f s", *counts, took_s)

    def run(self, step: Step) -> States | None:
        """Replay the step's forward; None where the step is better off without. A graph may choose the tokens, if one
        can for all sampled rows."""
        replay = self._staged(step)
        return None if replay is None else replay()

    def stage(self, step: Step) -> Callable[[], States] | None:
        """Only for a step that is captured: a capture runs the graph, in the memory of the step before."""
        return self._staged(step, captures_now=False)

    def _staged(self, step: Step, *, captures_now: bool = True) -> Callable[[], States] | None:
        """Fill this step's host side. What is returned sends it and replays."""
        batch, guesses, adapted = step.batch, step.guesses, step.adapters is not None
        kind = are_rows_alone(), adapted
        captures = self._captures_now(adapted=adapted) if captures_now else self._captures.get(kind)
        if captures is None or batch.trees is not None:
            return None
        follows = guesses is not None and guesses.most_behind is not None
        forwards = self._forwards_for(captures, step, verifies=guesses is not None, follows=follows)
        if forwards is None:
            return None
        cache_locs = self._tables.cache_locs(batch.row_slots, batch.row_positions)
        n_rows = len(batch.row_slots)
        size, sampling = step.n_common or forwards.bucket(n_rows), self._sampling.key(step)
        if not captures_now and not captures.have(forwards, size, sampling):
            return None
        replay = self._replay(captures, forwards, size)
        sample = None if sampling is None else self._sampling.replay(captures.sampling, sampling, self._hidden)
        choose = None if sample is None else functools.partial(self._sampling.choose, step, sample)
        self._staging.begin()
        self._staged_rows.fill(size, batch, cache_locs, step.writes)
        if self._adapted is not None and adapted:
            self._adapted.fill(size, step.adapters)
        if forwards is captures.verifying:
            self._staged_rows.fill_guesses(size, guesses)
            lens, slots = (batch.row_positions + 1).astype(np.int32), batch.row_slots.astype(np.int32)
            plans = self._plan(forwards.buffers, lens, slots)
        else:
            given = batch.kv_lens, batch.span_slots, batch.q_indptr, step.shared
            plans = self._plan(forwards.buffers, *given, settled=forwards is captures.decode)
            if follows:
                self._staged_rows.fill_guesses(size, guesses)
        if sampling is not None and sample is not None:
            self._sampling.fill(step, sampling[1])

        def replayed() -> States:
            if guesses is not None and not follows and forwards is not captures.verifying:
                self._tables.set_tokens(guesses.at, guesses.found)
            self._staging.send()
            if guesses is not None and guesses.found is not None and (follows or forwards is captures.verifying):
                standing.fill_in(self._staged_rows.guesses.device[:n_rows], guesses.found)
            if follows:
                self._move(plans[0], n_rows, writes=forwards is captures.mixed)
            replay()
            if self._pool.states is not None:
                self._pool.states.keep(step.plan.saves)
            return States(self._hidden[:n_rows], has_all=True, choose=choose)

        return replayed

    def follows(self, step: Step, most_behind: np.ndarray) -> bool:
        """See `Follower`."""
        captures, batch = self._captures_now(adapted=step.adapters is not None), step.batch
        group = self._pool.group
        if captures is None or are_rows_alone() or any(self._pool.windows) or step.wants_all:
            return False
        if group > small_rows_of(group):  # a row is a large line then, which cannot be placed
            return False
        earliest = batch.sampled_positions - np.repeat(most_behind, np.diff(batch.q_indptr))
        if len(batch.sampled_rows) > self._sampling.sizes[-1] or not self._tail.is_plain(step, earliest):
            return False
        forwards = self._forwards_for(captures, step, verifies=True, follows=True)
        return forwards is captures.verifying or (forwards is captures.mixed and self._can_be_placed(step))

    def _can_be_placed(self, step: Step) -> bool:
        """Whether its spans are lines of a mixed bucket that can be moved: small ones, which share nothing."""
        group = self._pool.group
        return bool(np.diff(step.batch.q_indptr).max() * group <= small_rows_of(group)) and not step.shared

    def _captures_now(self, *, adapted: bool) -> Captures | None:
        """Those of this region; None where there is no memory for them."""
        kind = are_rows_alone(), adapted
        if kind not in self._captures:
            try:
                self._captures[kind] = self._new_captures(adapted=adapted)
            except torch.OutOfMemoryError as error:
                logger.warning("steps with %s are launched kernel by kernel: %s", _KINDS[adapted], error)
                self._captures[kind] = None
        return self._captures[kind]

    def _forwards_for(self, captures: Captures, step: Step, *, verifies: bool, follows: bool) -> ForwardGraphs | None:
        """The graphs that can run this step at its best, or None. verifies: drafts that the token table lacks; follows:
        behind a step that may be computing."""
        n_rows, n_writes = len(step.batch.row_slots), len(step.writes.at)
        n_saved = self._pool.layout.n_full * sum((len(one.spans) - 1) * one.n_keys for one in step.shared)
        saved_bytes = n_saved * self._pool.bytes_per_token
        n_writes = -(-n_writes // self._n_groups)
        if self._exchange is not None:
            return captures.decode if n_rows <= step.n_common and n_writes <= step.n_common else None
        is_decode = n_rows == len(step.batch.span_slots) and n_writes <= captures.decode.bucket(n_rows)
        # only a sequence that enters may have been given pages that this very step fills
        is_settled = not step.plan.opened
        if is_decode and is_settled and saved_bytes < SHARING_PAYS_BYTES and self._holds(captures.decode, step.batch):
            return captures.decode
        most_again = FOLLOWING_AGAIN_BYTES if follows and not self._can_be_placed(step) else AGAIN_BYTES
        if verifies and self._verifies_apart(captures.verifying, step.batch, n_writes, most_again):
            return captures.verifying
        mixed = captures.mixed
        if mixed.holds(n_rows, n_writes) and self._holds(mixed, step.batch):
            return mixed
        return None

    def _holds(self, forwards: ForwardGraphs, batch: FlatBatch) -> bool:
        """Whether the work of attention fits, also where rows are alone, which cuts spans and long keys."""
        if not are_rows_alone():
            return True
        spans = apart(batch.q_indptr, batch.kv_lens, batch.span_slots, self._tables.prompt_lens[batch.span_slots])
        return forwards.room.holds(spans, self._pool.group)

    def _verifies_apart(self, verifying: ForwardGraphs, batch: FlatBatch, n_writes: int, most_again: int) -> bool:
        """Whether this step's rows can be, and should be, spans of their own: no prompt is among them."""
        n_rows, sizes = len(batch.row_slots), verifying.sizes
        if len(batch.sampled_rows) < n_rows or n_rows > sizes[-1] or n_writes > verifying.bucket(n_rows):
            return False
        if are_rows_alone():
            return self._holds(verifying, batch)
        n_again = int((batch.kv_lens * (np.diff(batch.q_indptr) - 1)).sum())
        return n_again * self._pool.bytes_per_token < most_again

    def _move(self, plan: AttnPlan, n_rows: int, *, writes: bool) -> None:
        """What was sent for rows that were planned for the latest place becomes true. writes: the captured step does
        not write guesses into the token table itself."""
        rows = self._staged_rows.rows.device[:, :n_rows]
        standing.move(self._tables, rows)
        if writes:
            standing.write(self._tables, rows, self._staged_rows.guesses.device[:n_rows])
        plan.place(rows[1])
        self._sampling.move(n_rows)

    def _plan(
        self,
        buffers: list[PlanBuffers],
        kv_lens: np.ndarray,
        slots: np.ndarray,
        q_indptr: np.ndarray | None = None,
        shared: Sequence[SharedPrefix] = (),
        *,
        settled: bool = False,
    ) -> list[AttnPlan]:
        return plan_attention(
            self._pool, self._tables, kv_lens, slots, q_indptr, buffers=buffers, shared=shared, settled=settled
        )

    def _idle(self, n_spans: int) -> tuple[np.ndarray, np.ndarray]:
        """Lengths and slots of spans that each see one key, of no sequence."""
        return np.ones(n_spans, np.int32), np.full(n_spans, self._tables.spare_slot, np.int32)

    def _replay(self, captures: Captures, forwards: ForwardGraphs, size: int) -> Callable[[], None]:
        """Captured now if it never was, which no sequence sees."""
        if size not in forwards.replays:
            forwards.replays[size] = self._capture_forward(captures, forwards, size)
        return forwards.replays[size]

    def _capture_forward(self, captures: Captures, forwards: ForwardGraphs, size: int) -> Callable[[], None]:
        slots, positions, *cache_locs = self._staged_rows.rows.device[:, :size]
        page_at, page = self._staged_rows.writes.device[:, : self._n_groups * size]
        verifies = forwards is captures.verifying
        context = PagedContext(self._pool, self._send_idle(captures, forwards, size), cache_locs)
        guesses = self._staged_rows.guesses.device[:size]
        adapted = self._adapted if captures.adapted else None
        if self._exchange is not None:
            self._exchange.begin_common(size)

        def forward() -> None:
            self._tables.pages.view(-1)[page_at] = page.to(torch.int32)
            token_ids = self._tables.tokens[slots, positions]
            if verifies:
                token_ids = torch.where(guesses == standing.NO_GUESS, token_ids, guesses.to(torch.int32))
                self._tables.tokens[slots, positions] = token_ids
            if self._pool.states is not None:
                context.spans = single_rows(slots, positions)
            with contextlib.nullcontext() if adapted is None else adapted.active(size):
                _compute(self._model, token_ids, positions, context, self._hidden[:size])

        return self._device.capture(forward)

    def _send_idle(self, captures: Captures, forwards: ForwardGraphs, size: int) -> list[AttnPlan]:
        """Rows of no sequence; returns what they attend by."""
        self._staging.begin()
        self._staged_rows.fill_idle(size)
        idle = self._idle(size if forwards is captures.verifying else min(size, self._max_num_seqs))
        plans = self._plan(forwards.buffers, *idle, settled=forwards is captures.decode)
        if captures.adapted and self._adapted is not None:
            self._adapted.fill(size)
        self._staging.send()
        return plans

    def join(self, n_common: int) -> None:
        """See `CommonForward`."""
        captures = self._captures_now(adapted=False)
        if captures is None:
            compute_for_others(self._model)
            return
        replay = self._replay(captures, captures.decode, n_common)
        self._send_idle(captures, captures.decode, n_common)
        replay()


def _compute(
    model: Decoder, token_ids: torch.Tensor, positions: torch.Tensor, context: PagedContext, out: torch.Tensor
) -> None:
    """States of all rows; and their features, where a head reads these."""
    features = context.pool.features
    visit = None if features is None else features.visit(context.cache_locs[0])
    whole = features is not None and features.reads(len(model.layers))
    model.forward(token_ids, positions, context.pool.around(context), out=out, visit=visit, visits_last=whole)
