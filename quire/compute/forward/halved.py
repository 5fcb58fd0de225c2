"""A long step of several ranks in two halves: while ranks sum what one of them gives, the other one is multiplied.

Owns where a step is cut, and how its halves go through the layers. Does not own how ranks sum (`dist`), nor what runs
beside what (`Device.beside`). Invariants: the first half is ahead in every layer, so the second one finds its keys; all
ranks queue the same sums in the same order. (vLLM calls it dual batch overlap.)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Final

import numpy as np
import torch

from quire.compute.device.device import Device
from quire.compute.dist.added import Launch
from quire.compute.forward.buckets import HIDDEN_FLOPS, rows_of
from quire.compute.forward.eager import sent
from quire.compute.layers.attention import Attention
from quire.compute.layers.decoder_layer import DecoderLayer
from quire.compute.layers.feed_forward import FeedForward
from quire.compute.layers.norm import Norm
from quire.compute.models.decoder import Decoder
from quire.compute.runner.batch_builder import FlatBatch
from quire.compute.runner.pool import KVPool, PagedContext, plan_attention
from quire.compute.runner.step import States, Step
from quire.compute.runner.tables import SlotTables
from quire.kernels.processors import FEW_BLOCKS, leaving

LEAST_ROWS: Final = 1024
"""Of a step that is cut: half of it keeps a GPU busy in each product."""
TILE_ROWS: Final = 256
"""Products on GPUs take rows in tiles of so many: the cut stands at a multiple."""


def cut_of(n_rows: int) -> int:
    """Rows of the first half."""
    return -(-n_rows // (2 * TILE_ROWS)) * TILE_ROWS


def spans_within(batch: FlatBatch, begin: int, end: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(q_indptr, kv_lens, slots) of the spans, or parts of them, in rows begin .. end - 1, as `plan_attention` takes
    them."""
    bounds = np.clip(batch.q_indptr, begin, end)
    lengths = np.diff(bounds)
    live = lengths > 0
    q_indptr = np.concatenate([[0], np.cumsum(lengths[live])]).astype(np.int32)
    kv_lens = batch.kv_lens - (batch.q_indptr[1:] - bounds[1:])  # a span that goes on behind `end`
    return q_indptr, kv_lens[live], batch.span_slots[live]


class Half:
    """Some rows of a step on their way through the layers."""

    def __init__(self, device: Device, x: torch.Tensor, positions: torch.Tensor, context: PagedContext) -> None:
        """x: their part of the residual stream [n, hidden]."""
        self.x, self.positions, self.context = x, positions, context
        self.taken: tuple[torch.Tensor, Norm | None] = x, None
        """What the feed-forward takes, and the norm that is still to be done."""
        self._device = device
        self._wait: Callable[[], None] | None = None
        self._held: Launch | None = None

    def sum_beside(self, launch: Launch) -> torch.Tensor | None:
        """Queue its sum beside what the other half does. Its tensors are kept until they are not read any more."""
        found: list[torch.Tensor | None] = []
        self._held, self._wait = launch, self._device.beside(lambda: found.append(launch()))
        return found[0]

    def wait(self) -> None:
        """What is queued from now on finds its last sum."""
        if self._wait is not None:
            self._wait()
        self._held = self._wait = None


class HalvedForward:
    """`Forward` of steps with many rows; others are for the rest."""

    def __init__(
        self, device: Device, model: Decoder, pool: KVPool, tables: SlotTables, least_rows: int | None = None
    ) -> None:
        """Of a model that `can_halve`. least_rows: of a step that is cut; None: as many as it pays for."""
        self._device, self._model, self._pool, self._tables = device, model, pool, tables
        paying = max(LEAST_ROWS, rows_of(model.arch, 2 * HIDDEN_FLOPS))  # halves are twice as many launches
        self._least_rows = max(paying if least_rows is None else least_rows, TILE_ROWS + 1)

    def stage(self, _: Step) -> None:
        """It has little to do on the host."""

    def run(self, step: Step) -> States | None:
        """As `EagerForward.run`."""
        batch = step.batch
        n_rows, n_sampled = len(batch.row_slots), len(batch.sampled_rows)
        is_more = step.shared or step.adapters is not None or batch.trees is not None
        if n_rows < self._least_rows or is_more:
            return None
        token_ids, positions, locs = sent(self._device, self._tables, step)
        whole = self._context(batch, locs, 0, n_rows)
        x, cut = self._model.entered(token_ids, positions), cut_of(n_rows)
        halves = [
            Half(self._device, x[begin:end], positions[begin:end], self._context(batch, locs, begin, end))
            for begin, end in ((0, cut), (cut, n_rows))
        ]
        for layer in self._model.layers[:-1]:
            self._model.n_begun += 1
            self._compute(layer, halves)
        for half in halves:
            half.wait()
        sampled = self._device.upload(batch.sampled_rows) if n_sampled < n_rows else None
        wanted = None if n_sampled == 0 or step.wants_all else sampled
        self._model.n_begun += 1
        hidden = self._model.layers[-1](x, positions, whole, wanted)
        return States(hidden, has_all=sampled is not None and wanted is None, sampled=sampled)

    def _context(self, batch: FlatBatch, locs: list[torch.Tensor], begin: int, end: int) -> PagedContext:
        q_indptr, kv_lens, slots = spans_within(batch, begin, end)
        plans = plan_attention(self._pool, self._tables, kv_lens, slots, q_indptr)
        return PagedContext(self._pool, plans, [one[begin:end] for one in locs])

    def _compute(self, layer: DecoderLayer, halves: list[Half]) -> None:
        """The sum of the second half's attention goes beside the first half's widest product, that of the first half's
        feed-forward beside the second's."""
        first, second = halves
        for half in halves:
            half.wait()
            y = layer.mixer(half.x, layer.attention_norm, half.positions, half.context)
            with self._beside(half if half is second else None):
                half.taken = layer.attention_sum.then(y, half.x, layer.ffn_norm)
        for half in halves:
            half.wait()
            with leaving(FEW_BLOCKS):
                taken = layer.ffn.take(*half.taken)
            first.wait()  # of the second half: sums follow one another
            with self._beside(half if half is first else None):
                layer.ffn.add(taken, half.x)

    def _beside(self, half: Half | None) -> contextlib.AbstractContextManager[None]:
        assert self._model.ranks is not None
        return contextlib.nullcontext() if half is None else self._model.ranks.through(half.sum_beside)


def can_halve(model: Decoder, pool: KVPool) -> bool:
    """Whether each layer is attention and a feed-forward, whose sums over ranks go straight to the stream."""
    is_plain = pool.states is None and pool.features is None and pool.across is None and pool.n_ranks == 1
    return model.ranks is not None and model.is_whole and is_plain and all(
        type(layer) is DecoderLayer and layer.spec.is_plain and isinstance(layer.mixer, Attention)
        and isinstance(layer.ffn, FeedForward) and layer.attention_sum.is_bare and layer.ffn.sum.is_bare
        for layer in model.layers
    )  # fmt: skip
