"""Spans of a step for which latent attention makes keys and values of lines, those of cached prefixes too.

Owns which these are, where their lines lie, and attention over keys made so. Does not own what is made
(`layers/latent`).
Invariants: the rows of a step are in one of both parts, in their order; keys and values that are there at once are no
more numbers than those of `max_rows` tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
import torch

from quire.compute.device.device import Device
from quire.compute.runner.batch_builder import FlatBatch
from quire.compute.runner.tables import SlotTables
from quire.config.layers import MixerSpec
from quire.kernels import attention
from quire.kernels.attention import AttnPlan, Variant
from quire.kernels.invariance import are_rows_alone

LEAST_ROWS: Final = 128
"""Of such spans in a step, below which launches for two parts cost more than they save."""
LEAST_CHUNK: Final = 512
"""Of a span behind a cached prefix. By operations DeepSeek's heads need 171, but keys and values are also written and
read, which on a GPU takes longer than making them."""


class ExpandedSpans:
    """Of one step."""

    def __init__(self, batch: FlatBatch, chosen: np.ndarray, tables: SlotTables, device: Device, max_rows: int) -> None:
        """chosen: bool [n_spans]. max_rows: what the workspace has room for."""
        lengths = np.diff(batch.q_indptr)
        of_rows = np.repeat(chosen, lengths)
        self.rows, self.others = (_places(part, device) for part in (of_rows, ~of_rows))
        """Rows of these spans, and the others."""
        self.n_rows = int(of_rows.sum())
        self.q_indptr = np.concatenate(([0], np.cumsum(np.where(chosen, 0, lengths)))).astype(np.int32)
        """int32 [n_spans + 1]: the spans over the other rows; those that are chosen have none."""
        n_lines = batch.kv_lens[chosen].astype(np.int64)
        self._q_bounds, self._kv_bounds = _bounds(lengths[chosen]), _bounds(n_lines)
        self.n_lines = int(self._kv_bounds[-1])
        slots = np.repeat(batch.span_slots[chosen].astype(np.int64), n_lines)
        places = np.arange(self.n_lines) - np.repeat(self._kv_bounds[:-1], n_lines)
        self.locs = device.upload(tables.cache_locs(slots, places))
        """int64 [n_groups, n_lines]: where the lines lie that the rows see, page * page_size + offset."""
        self._max_rows = max_rows
        self._plans: dict[tuple[int, int], AttnPlan] = {}

    def heads(self, n_heads: int) -> Iterator[slice]:
        """Those whose keys of all lines are there at once, in turn."""
        step = min(n_heads, max(1, n_heads * self._max_rows // self.n_lines))
        return (slice(first, min(first + step, n_heads)) for first in range(0, n_heads, step))

    def pieces(self) -> Iterator[slice]:
        """Lines that are read at once, in turn."""
        return (slice(at, min(at + self._max_rows, self.n_lines)) for at in range(0, self.n_lines, self._max_rows))

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, variant: Variant) -> torch.Tensor:
        """Causal attention of each row to the lines of its span. q: [n_rows, n_heads, d]; k, v: [n_lines, n_heads,
        d], a head each."""
        n_heads, head_dim = q.shape[1:]
        plan = self._plans.get((n_heads, head_dim))
        if plan is None:
            plan = self._plans[n_heads, head_dim] = attention.plan_ragged(
                self._q_bounds, self._kv_bounds, n_q_heads=n_heads, n_kv_heads=n_heads, head_dim=head_dim,
                device=q.device,
            )  # fmt: skip
        return attention.run(q, k, v, plan, variant)


def expanded_spans(
    batch: FlatBatch, mixer: MixerSpec, tables: SlotTables, device: Device, max_rows: int
) -> ExpandedSpans | None:
    """Sequences from their first token on, and long chunks behind a prefix where that spares operations, as far as the
    workspace for `max_rows` rows has room. None where they are few, or rows are to be alone."""
    lengths = np.diff(batch.q_indptr)
    chosen = (lengths == batch.kv_lens) & (lengths > 1)
    if batch.trees is not None or are_rows_alone():
        return None
    room = mixer.n_heads * max_rows - int(batch.kv_lens[chosen].sum())
    for span in np.flatnonzero((lengths < batch.kv_lens) & (lengths >= LEAST_CHUNK)):
        n_lines = int(batch.kv_lens[span])
        if n_lines <= room and mixer.spared_flops(int(lengths[span]), n_lines) > 0:
            chosen[span] = True
            room -= n_lines
    return None if lengths[chosen].sum() < LEAST_ROWS else ExpandedSpans(batch, chosen, tables, device, max_rows)


def _places(chosen: np.ndarray, device: Device) -> torch.Tensor | slice:
    """Where chosen: a slice if they lie side by side, as prompts behind decodes do, so that nothing is copied."""
    places = np.flatnonzero(chosen)
    first = int(places[0]) if len(places) else 0
    beside = slice(first, first + len(places))
    return beside if chosen[beside].all() else device.upload(places)


def _bounds(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
