"""Steps of a head over rows of several sequences: in one native call, or operation by operation.

Owns the memory of a step's rows. Does not own the parameters (`head.py`) nor which rows there are (`eagle.py`).
Invariant: both ways compute the same; the native one is for the CPU with its library.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from quire.compute.device.device import Device
from quire.compute.draft.head import Head
from quire.compute.layers.decoder_layer import LayerRows
from quire.compute.runner.pool import KVPool, PagedContext, plan_attention
from quire.compute.runner.tables import SlotTables
from quire.compute.schemes.packed import PackedProduct
from quire.kernels import fused_step
from quire.kernels.fused_step import TreeRows
from quire.kernels.qgemm.cpu import ADD, WIDEN


@dataclasses.dataclass(slots=True)
class HeadRows:
    """Rows of one step: of each span (slot, start, length), one after another."""

    slots: np.ndarray
    """int64 [n]."""
    positions: np.ndarray
    """int64 [n]."""
    q_indptr: np.ndarray
    """int32 [n_spans + 1]."""
    kv_lens: np.ndarray
    """int32 [n_spans]."""
    span_slots: np.ndarray
    """int32 [n_spans]."""
    wanted: np.ndarray
    """int64 [m]: rows whose guess is wanted."""
    trees: TreeRows | None = None
    """Where spans are trees."""

    @property
    def places(self) -> np.ndarray:
        """int64 [n]: where their tokens stand, and their keys."""
        return self.positions if self.trees is None else self.trees.places

    @classmethod
    def of(cls, spans: Sequence[tuple[int, int, int]], *, wants: bool) -> HeadRows:
        """wants: the guess behind the last row of each."""
        slots, starts, lengths = (np.array(column, np.int64) for column in zip(*spans, strict=True))
        ends = np.array([0, *itertools.accumulate(lengths.tolist())], np.int32)
        rows = np.repeat(slots, lengths), np.arange(ends[-1]) + np.repeat(starts - ends[:-1], lengths)
        wanted = ends[1:].astype(np.int64) - 1 if wants else np.zeros(0, np.int64)
        return cls(*rows, ends, (starts + lengths).astype(np.int32), slots.astype(np.int32), wanted)

    def advance(self) -> None:
        """The next position of each span, all of which have one row."""
        self.positions += 1
        self.kv_lens += 1


class HeadSteps(Protocol):
    """A way to compute steps."""

    states: torch.Tensor
    """[max_rows, hidden]: before a step the features of its rows, after it those of the rows behind the ones wanted."""

    logits: np.ndarray
    """float32 [>= m, the head's vocabulary], after a step of the rows wanted."""

    def step(self, rows: HeadRows) -> np.ndarray:
        """int64 [m]: the head's best token for each row wanted. The tokens of the rows are in the token table."""
        ...


class EagerSteps:
    """Operation by operation, on any device."""

    def __init__(self, device: Device, head: Head, pool: KVPool, tables: SlotTables, max_rows: int) -> None:
        self._device, self._head, self._pool, self._tables = device, head, pool, tables
        self.states = device.zeros((max_rows, head.arch.arch.hidden_size), head.dtype)
        self.logits = np.zeros((0, head.arch.arch.vocab_size), np.float32)

    @torch.inference_mode()
    def step(self, rows: HeadRows) -> np.ndarray:
        """See `HeadSteps`."""
        locs = self._tables.cache_locs(rows.slots, rows.places)[:1]
        lines = [rows.slots, rows.positions, rows.places]
        slots, positions, places, cache_locs = self._device.upload(np.concatenate([lines, locs]))
        plans = plan_attention(
            self._pool, self._tables, rows.kv_lens, rows.span_slots, rows.q_indptr,
            trees=None if rows.trees is None else rows.trees.trees,
        )  # fmt: skip
        context = PagedContext(self._pool, plans, [cache_locs])
        token_ids = self._tables.tokens[slots, places]
        features, wanted = self.states[: len(rows.slots)].clone(), self._device.upload(rows.wanted)
        states, logits = self._head.forward(token_ids, features, positions, context, wanted)
        self.states[: len(states)] = self._head.chained(states)
        self.logits = logits.cpu().numpy()
        best: np.ndarray = self.logits.argmax(1)
        return best


def obstacle(head: Head) -> str | None:
    """Why steps of this head cannot be native calls here, or None."""
    if any(not isinstance(linear.product, PackedProduct) for linear in [*head.linears, head.head]):
        return "its matrices are not packed for the native kernels"
    if not head.layer.is_plain or not head.layer.attention.variant.built_in or head.embedded_norm.pair is None:
        return "its layer is not RMS norm, attention, RMS norm and SwiGLU, and nothing else"
    return fused_step.obstacle(head.dtype, head.arch.arch.head_dim)


class NativeSteps:
    """One native call a step; there must be no obstacle."""

    def __init__(
        self, device: Device, head: Head, pool: KVPool, tables: SlotTables, max_rows: int, max_sampled: int
    ) -> None:
        arch, layer = head.arch.arch, head.layer
        mixer = layer.spec.mixer

        def rows(width: int) -> torch.Tensor:
            return device.zeros((max_rows, width), head.dtype)

        self.states, embedded = rows(arch.hidden_size), rows(arch.hidden_size)
        memory = LayerRows(
            rows(arch.hidden_size) if head.makes_input else self.states, rows(mixer.q_size + 2 * mixer.kv_size),
            rows(mixer.q_size), rows(arch.ffn_size), [(pool.pages_of[0], 0)],
        )  # fmt: skip
        logits = device.zeros((max_sampled, arch.vocab_size), torch.float32)
        self.logits = logits.numpy()
        self._fused = fused = fused_step.FusedStep(
            tables.tokens, tables.pages, tables.page_size, arch.n_heads, arch.n_kv_heads, arch.head_dim
        )
        fused.embed(head.embed.weight, embedded)
        joined = memory.x if head.makes_input else memory.qkv
        head.embedded.record(fused, embedded, joined, norm=head.embedded_norm.pair)
        head.feature.record(fused, self.states, joined, norm=head.feature_norm.pair, then=ADD)
        if head.makes_input:
            layer.record(fused, memory, is_last=True)
        else:
            layer.record_behind(fused, memory, is_last=True)
        head.head.record(fused, memory.x, logits, norm=head.norm.pair, then=WIDEN)
        self._head, self._x = head, memory.x

    def step(self, rows: HeadRows) -> np.ndarray:
        """See `HeadSteps`."""
        self._fused.run(
            rows.slots, rows.positions, rows.q_indptr, rows.kv_lens, rows.span_slots, rows.wanted, trees=rows.trees
        )
        n = len(rows.wanted)
        if n and self._head.makes_input:
            self.states[:n] = self._head.chained(self._x[:n])
        best: np.ndarray = self.logits[:n].argmax(1)
        return best
