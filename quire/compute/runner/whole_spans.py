"""Sequences that a step computes from their first token on: latent attention makes keys and values of their lines.

Owns which these are, and attention over their rows alone. Does not own what is made (`layers/latent`).
Invariant: the rows of a step are in one of both parts, in their order.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch

from quire.compute.device.device import Device
from quire.compute.runner.batch_builder import FlatBatch
from quire.kernels import attention
from quire.kernels.attention import AttnPlan, Variant
from quire.kernels.invariance import are_rows_alone

LEAST_ROWS: Final = 128
"""Of such sequences in a step, below which launches for two parts cost more than they save."""


class WholeSpans:
    """Of one step."""

    def __init__(self, batch: FlatBatch, is_whole: np.ndarray, device: Device) -> None:
        """is_whole: bool [n_spans]."""
        lengths = np.diff(batch.q_indptr)
        chosen = np.repeat(is_whole, lengths)
        self.rows, self.others = (device.upload(np.flatnonzero(part)) for part in (chosen, ~chosen))
        """int64: rows of whole sequences, and the others."""
        self.q_indptr = np.concatenate(([0], np.cumsum(np.where(is_whole, 0, lengths)))).astype(np.int32)
        """int32 [n_spans + 1]: the spans over the other rows; those that are whole have none."""
        self._bounds = np.concatenate(([0], np.cumsum(lengths[is_whole]))).astype(np.int32)
        self._plans: dict[tuple[int, int], AttnPlan] = {}

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, variant: Variant) -> torch.Tensor:
        """Causal attention among the rows of each whole sequence. q, k, v: [n_rows, n_heads, d], a head each."""
        n_heads, head_dim = q.shape[1:]
        plan = self._plans.get((n_heads, head_dim))
        if plan is None:
            plan = self._plans[n_heads, head_dim] = attention.plan_ragged(
                self._bounds, self._bounds, n_q_heads=n_heads, n_kv_heads=n_heads, head_dim=head_dim, device=q.device
            )
        return attention.run(q, k, v, plan, variant)


def whole_spans(batch: FlatBatch, device: Device) -> WholeSpans | None:
    """None where such sequences are few, or rows are to be alone."""
    lengths = np.diff(batch.q_indptr)
    is_whole = (lengths == batch.kv_lens) & (lengths > 1)
    if batch.trees is not None or are_rows_alone() or lengths[is_whole].sum() < LEAST_ROWS:
        return None
    return WholeSpans(batch, is_whole, device)
