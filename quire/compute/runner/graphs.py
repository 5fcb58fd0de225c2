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
from quire.compute.runner.pool import KVPool, PagedContext, plan_attention
from quire.compute.runner.tables import SlotTables
from quire.kernels.attention import op as attention
from quire.kernels.attention.plan import AttnPlan

logger = logging.getLogger("quire.engine")

N_INPUTS = 3
"""Rows of the input buffer: slot, position, cell; all 0 in padding, so padding writes to page 0."""


def bucket_sizes(largest: int) -> list[int]:
    """1, 2, 4, 8, then every 8 to 64, every 16 to 256, every 32 up to `largest`, which is always among them."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, largest + 1, 32)]
    return sorted({size for size in sizes if size < largest} | {largest})


class DecodeGraphs:
    """One graph a bucket. Replaying costs two uploads and one launch, whatever the number of layers."""

    def __init__(self, device: CudaDevice, model: DenseModel, pool: KVPool, tables: SlotTables, largest: int) -> None:
        self._device = device
        self._model = model
        self._pool = pool
        self._tables = tables
        self._sizes = bucket_sizes(largest)
        self._inputs = device.upload(np.zeros((N_INPUTS, largest), np.int64))
        # One for all buckets: a graph's own output would be kept for each of them.
        self._logits = device.zeros((largest, model.arch.vocab_size), torch.float32)
        self._buffers = attention.plan_buffers(plan_attention(pool, tables, *_idle(largest)), largest, span_tokens=1)
        """The attention plan of the step that runs: one set for all buckets, at fixed addresses."""
        self._replays: dict[int, Callable[[], None]] = {}

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture every bucket, largest first, so that smaller ones reuse its memory."""
        start_s = time.perf_counter()
        for size in reversed(self._sizes):
            self._replays[size] = self._capture(size)
        logger.info("graphs: %d captured in %.1f s", len(self._sizes), time.perf_counter() - start_s)

    def fits(self, batch: FlatBatch) -> bool:
        """True if a captured bucket can run this batch."""
        n_rows = len(batch.row_slots)
        return 0 < n_rows <= self._sizes[-1] and n_rows == len(batch.sampled_rows) == len(batch.span_slots)

    def run(self, batch: FlatBatch, cells: np.ndarray) -> torch.Tensor:
        """Logits float32 [n_rows, vocab] of the batch; overwritten by the next replay."""
        n_rows = len(batch.row_slots)
        size = next(size for size in self._sizes if size >= n_rows)
        inputs = np.zeros((N_INPUTS, size), np.int64)
        inputs[:, :n_rows] = batch.row_slots, batch.row_positions, cells
        self._inputs[:, :size].copy_(self._device.upload(inputs))
        self._plan(batch.kv_lens, batch.span_slots)
        self._replays[size]()
        return self._logits[:n_rows]

    def _plan(self, kv_lens: np.ndarray, slots: np.ndarray) -> AttnPlan:
        return plan_attention(self._pool, self._tables, kv_lens, slots, buffers=self._buffers)

    def _capture(self, size: int) -> Callable[[], None]:
        slots, positions, cells = self._inputs[:, :size]
        context = PagedContext(self._pool, self._plan(*_idle(size)), cells)

        def forward() -> torch.Tensor:
            token_ids = self._tables.tokens[slots, positions]
            return self._model.logits(self._model.forward(token_ids, positions, context), out=self._logits[:size])

        replay, _ = self._device.capture(forward)
        return replay


def _idle(n_spans: int) -> tuple[np.ndarray, np.ndarray]:
    """Lengths and slots of spans that each see one key."""
    return np.ones(n_spans, np.int32), np.zeros(n_spans, np.int32)
