"""Joining attention states in torch: any type and device, a pass over them for each of some ten steps."""

from __future__ import annotations

import torch


def merge(outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See `attention.merge`; stacked in front."""
    wide = torch.promote_types(outs.dtype, torch.float32)
    lses = lses.to(wide)
    nothing = lses == float("-inf")
    total = lses.logsumexp(0)
    weights = torch.exp(lses - total.masked_fill(nothing.all(0), 0.0))
    merged = (weights.unsqueeze(-1) * outs.to(wide).masked_fill(nothing.unsqueeze(-1), 0.0)).sum(0)
    return merged.to(outs.dtype), total
