"""Captured forwards for steps in which every span is one token that wants its successor: pure decode.

Owns the buckets and their input buffers. Does not own sampling, which stays outside the graph.
Invariant: row i of a replay equals row i of the eager forward; padding rows attend to nothing and write to page 0.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import numpy as np
import torch

from quire.compute.device.cuda import CudaDevice
from quire.compute.models.dense import DenseModel
from quire.compute.runner.batch import FlatBatch
from quire.compute.runner.pool import KVPool, PagedContext
from quire.compute.runner.tables import SlotTables
from quire.kernels.attention import op as attention

logger = logging.getLogger("quire.engine")

N_INPUTS = 3
"""Rows of the input buffer: slot, position (-1 in padding), cell."""


def bucket_sizes(largest: int) -> list[int]:
    """1, 2, 4, 8, then every 8 to 64, every 16 to 256, every 32 up to `largest`, which is always among them."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, largest + 1, 32)]
    return sorted({size for size in sizes if size < largest} | {largest})


class DecodeGraphs:
    """One graph a bucket. Replaying costs one upload and one launch, whatever the number of layers."""

    def __init__(self, device: CudaDevice, model: DenseModel, pool: KVPool, tables: SlotTables, largest: int) -> None:
        self._device = device
        self._model = model
        self._pool = pool
        self._tables = tables
        self._sizes = bucket_sizes(largest)
        self._inputs = device.upload(np.zeros((N_INPUTS, largest), np.int64))
        self._graphs: dict[int, tuple[Callable[[], None], torch.Tensor]] = {}

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture every bucket, largest first, so that smaller ones reuse its memory."""
        start_s = time.perf_counter()
        for size in reversed(self._sizes):
            self._graphs[size] = self._device.capture(lambda n=size: self._forward(n))
        logger.info("graphs: %d captured in %.1f s", len(self._sizes), time.perf_counter() - start_s)

    def fits(self, batch: FlatBatch) -> bool:
        """True if a captured bucket can run this batch."""
        n_rows = len(batch.row_slots)
        return n_rows == len(batch.sampled_rows) == len(batch.span_slots) and n_rows <= self._sizes[-1]

    def run(self, batch: FlatBatch, cells: np.ndarray) -> torch.Tensor:
        """Logits float32 [n_rows, vocab] of the batch; overwritten by the next replay."""
        n_rows = len(batch.row_slots)
        size = next(size for size in self._sizes if size >= n_rows)
        inputs = np.zeros((N_INPUTS, size), np.int64)
        inputs[1] = -1
        inputs[:, :n_rows] = batch.row_slots, batch.row_positions, cells
        self._inputs[:, :size].copy_(self._device.upload(inputs))
        replay, logits = self._graphs[size]
        replay()
        return logits[:n_rows]

    def _forward(self, size: int) -> torch.Tensor:
        slots, positions, cells = self._inputs[:, :size]
        known = positions.clamp(min=0)
        token_ids = self._tables.tokens[slots, known]
        plan = attention.decode_plan(
            slots.to(torch.int32),
            (positions + 1).to(torch.int32),
            self._tables.pages,
            page_size=self._pool.k.shape[3],
            n_q_heads=self._model.arch.n_heads,
            n_kv_heads=self._pool.k.shape[2],
            head_dim=self._pool.k.shape[4],
        )
        hidden = self._model.forward(token_ids, known, PagedContext(self._pool, plan, cells))
        return self._model.logits(hidden)
