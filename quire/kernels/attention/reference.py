"""Paged causal attention in plain torch: the oracle. Arithmetic in float32, or in float64 for float64 inputs."""

from __future__ import annotations

import torch

from quire.kernels.attention.plan import AttnPlan, Variant

TOLERANCE = {torch.float64: 1e-12, torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""dtype → largest |kernel - float64 reference| for values of about unit size: probabilities and output rounded once."""


def tiles(plan: AttnPlan) -> None:
    """The reference needs no work list."""


def run(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    plan: AttnPlan,
    variant: Variant,
    out: torch.Tensor,
) -> torch.Tensor:
    """One span after another: gather its pages, mask, softmax."""
    bounds = plan.q_indptr.tolist()
    for span, (kv_len, slot) in enumerate(zip(plan.kv_lens.tolist(), plan.slots.tolist(), strict=True)):
        rows = slice(bounds[span], bounds[span + 1])
        if rows.stop > rows.start:
            n_pages = -(-kv_len // plan.page_size)
            pages = plan.page_table[slot, :n_pages].long()
            keys = k_pages[pages].transpose(1, 2).flatten(0, 1)[:kv_len]
            values = v_pages[pages].transpose(1, 2).flatten(0, 1)[:kv_len]
            out[rows] = _attend(q[rows], keys, values, variant)
    return out


def _attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, variant: Variant) -> torch.Tensor:
    """q: [n, hq, d] at the last n positions of keys, values: [kv_len, hk, d]. Returns [n, hq, d]."""
    wide = torch.promote_types(q.dtype, torch.float32)
    group = q.shape[1] // keys.shape[1]
    keys, values = (x.to(wide).repeat_interleave(group, dim=1) for x in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", q.to(wide), keys) * variant.scale
    if variant.softcap > 0:
        scores = variant.softcap * torch.tanh(scores / variant.softcap)
    last = torch.arange(keys.shape[0] - q.shape[0], keys.shape[0], device=q.device).unsqueeze(1)
    position = torch.arange(keys.shape[0], device=q.device).unsqueeze(0)
    hidden = position > last
    if variant.window > 0:
        hidden |= position <= last - variant.window
    weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
