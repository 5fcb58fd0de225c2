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
from quire.compute.runner.features import Features
from quire.compute.runner.pool import KVPool, PagedContext, plan_attention
from quire.compute.runner.tables import SlotTables
from quire.compute.schemes.packed import PackedProduct
from quire.kernels import fused_step
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

    @classmethod
    def of(cls, spans: Sequence[tuple[int, int, int]], *, wants: bool) -> HeadRows:
        """wants: the guess behind the last row of each."""
        ends = [0, *itertools.accumulate(length for _, _, length in spans)]
        return cls(
            np.array([slot for slot, _, length in spans for _ in range(length)], np.int64),
            np.array([at for _, start, length in spans for at in range(start, start + length)], np.int64),
            np.array(ends, np.int32),
            np.array([start + length for _, start, length in spans], np.int32),
            np.array([slot for slot, _, _ in spans], np.int32),
            np.array([end - 1 for end in ends[1:]] if wants else [], np.int64),
        )

    def behind(self, n: int) -> HeadRows:
        """The row behind each of the first `n` wanted."""
        slots, positions = self.slots[self.wanted[:n]], self.positions[self.wanted[:n]] + 1
        kv_lens, kv_at = (positions + 1).astype(np.int32), slots.astype(np.int32)
        return HeadRows(slots, positions, np.arange(n + 1, dtype=np.int32), kv_lens, kv_at, np.arange(n))


class HeadSteps(Protocol):
    """A way to compute steps."""

    def read(self, rows: HeadRows) -> None:
        """Compute rows of which none is wanted. Their features are in the model's pages, here and in `guess`."""
        ...

    def guess(self, rows: HeadRows, n_places: np.ndarray) -> np.ndarray:
        """int32 [most, m]: column i has the model's ids of the n_places[i] tokens that the head guesses behind the row
        wanted i, each from the one before it. n_places: int32 [m], not rising, at least 1.

        The tokens of the rows are in the token table; so are the guesses then.
        """
        ...


class EagerSteps:
    """Operation by operation, on any device."""

    def __init__(self, device: Device, head: Head, pool: KVPool, tables: SlotTables, features: Features) -> None:
        self._device, self._head, self._pool, self._tables, self._features = device, head, pool, tables, features

    def read(self, rows: HeadRows) -> None:
        """See `HeadSteps`."""
        self._step(rows, self._read(rows))

    def guess(self, rows: HeadRows, n_places: np.ndarray) -> np.ndarray:
        """See `HeadSteps`: a step for each place."""
        found, features = np.zeros((int(n_places[0]), len(n_places)), np.int32), self._read(rows)
        for place in range(len(found)):
            n = int(np.count_nonzero(n_places > place))
            if place:
                rows = rows.behind(n)
            best, features = self._step(rows, features[: len(rows.slots)])
            found[place, :n] = self._head.token_ids[best]
            at = np.stack([rows.slots[rows.wanted], rows.positions[rows.wanted] + 1, found[place, :n]])
            self._tables.set_tokens(at)
        return found

    @torch.inference_mode()
    def _step(self, rows: HeadRows, features: torch.Tensor) -> tuple[np.ndarray, torch.Tensor]:
        """int64 [m]: the head's best token for each row wanted, and the features of the rows behind these."""
        locs = self._tables.cache_locs(rows.slots, rows.positions)[:1]
        slots, positions, cache_locs = self._device.upload(np.concatenate([[rows.slots, rows.positions], locs]))
        plans = plan_attention(self._pool, self._tables, rows.kv_lens, rows.span_slots, rows.q_indptr)
        context = PagedContext(self._pool, plans, [cache_locs])
        token_ids = self._tables.tokens[slots, positions]
        wanted = self._device.upload(rows.wanted)
        states, logits = self._head.forward(token_ids, features, positions, context, wanted)
        best: np.ndarray = logits.argmax(1).cpu().numpy()
        return best, self._head.chained(states)

    @torch.inference_mode()
    def _read(self, rows: HeadRows) -> torch.Tensor:
        """[n, hidden]: of each row what the model left of the token before, zeros before the first."""
        before = np.maximum(rows.positions - 1, 0)
        locs, first = self._tables.cache_locs(rows.slots, before)[0], self._device.upload(rows.positions == 0)
        states = self._features.read(self._device.upload(locs))
        if self._head.model_norm is not None:
            states = self._head.model_norm(states)
        states[first] = 0
        return states


def obstacle(head: Head) -> str | None:
    """Why steps of this head cannot be native calls here, or None."""
    if any(not isinstance(linear.product, PackedProduct) for linear in [*head.linears, head.head]):
        return "its matrices are not packed for the native kernels"
    if head.model_norm is not None and head.model_norm.pair is None:
        return "the states that it reads are not RMS normed"
    if not head.layer.is_plain or not head.layer.attention.variant.built_in or head.embedded_norm.pair is None:
        return "its layer is not RMS norm, attention, RMS norm and SwiGLU, and nothing else"
    return fused_step.obstacle(head.dtype, head.arch.arch.head_dim)


class NativeSteps:
    """One native call a step; there must be no obstacle."""

    def __init__(
        self,
        device: Device,
        head: Head,
        pool: KVPool,
        tables: SlotTables,
        features: Features,
        *,
        max_rows: int,
        max_sampled: int,
    ) -> None:
        arch, layer = head.arch.arch, head.layer
        mixer = layer.spec.mixer

        def rows(width: int) -> torch.Tensor:
            return device.zeros((max_rows, width), head.dtype)

        states, embedded = rows(arch.hidden_size), rows(arch.hidden_size)
        memory = LayerRows(
            rows(arch.hidden_size) if head.makes_input else states, rows(mixer.q_size + 2 * mixer.kv_size),
            rows(mixer.q_size), rows(arch.ffn_size), [(pool.pages_of[0], 0)],
        )  # fmt: skip
        self._ids = head.token_ids
        self._logits = device.zeros((max_sampled, arch.vocab_size), torch.float32)
        self._fused = fused = fused_step.FusedStep(
            tables.tokens, tables.pages, tables.page_size, arch.n_heads, arch.n_kv_heads, arch.head_dim
        )
        fused.load(states, features.first, features.second)
        if head.model_norm is not None and head.model_norm.pair is not None:
            fused.norm(states, head.model_norm.pair, states)
        fused.begin_link()
        fused.embed(head.embed.weight, embedded)
        joined = memory.x if head.makes_input else memory.qkv
        head.embedded.record(fused, embedded, joined, norm=head.embedded_norm.pair)
        head.feature.record(fused, states, joined, norm=head.feature_norm.pair, then=ADD)
        if head.makes_input:
            layer.record(fused, memory, is_last=True)
        else:
            layer.record_behind(fused, memory, is_last=True)
        head.head.record(fused, memory.x, self._logits, norm=head.norm.pair, then=WIDEN)
        if head.makes_input:  # else what the rows wanted leave is the next feature as it is, and where it is read
            assert head.norm.pair is not None
            fused.norm(memory.x, head.norm.pair, states)

    def read(self, rows: HeadRows) -> None:
        """See `HeadSteps`."""
        self._fused.run(*_arrays(rows))

    def guess(self, rows: HeadRows, n_places: np.ndarray) -> np.ndarray:
        """See `HeadSteps`."""
        return self._fused.chain(self._logits, n_places, *_arrays(rows), ids=self._ids)


def _arrays(rows: HeadRows) -> tuple[np.ndarray, ...]:
    """As `kernels.fused_step.FusedStep.run` takes them."""
    return rows.slots, rows.positions, rows.q_indptr, rows.kv_lens, rows.span_slots, rows.wanted
