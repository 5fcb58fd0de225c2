"""Log-probabilities of given tokens and of the most probable ones, in torch, on any device."""

from __future__ import annotations

from typing import Final

import torch

from quire.kernels.sample.cells import pack
from quire.kernels.sample.top import top

CACHE: Final = 1 << 15
"""Logits worked on at a time, or one row: torch does not split the sum of so few, so its order is fixed."""


def lines(logits: torch.Tensor, targets: torch.Tensor, k: int) -> torch.Tensor:
    """See `op.lines`."""
    n_chunk = max(1, CACHE // logits.shape[1])
    starts = range(0, max(1, len(logits)), n_chunk)
    parts = [_lines(logits[at : at + n_chunk], targets[at : at + n_chunk, None].long(), k) for at in starts]
    return pack(*(torch.cat(column) for column in zip(*parts, strict=True)))


def _lines(logits: torch.Tensor, targets: torch.Tensor, k: int) -> tuple[torch.Tensor, ...]:
    """Of a few rows; targets: int64 [r, 1]."""
    chosen = logits.gather(1, targets)
    peaks = logits.amax(-1, keepdim=True)
    normaliser = (logits - peaks).exp_().sum(-1, keepdim=True).log_().add_(peaks)
    ranks = torch.gt(logits, chosen, out=torch.empty_like(logits)).sum(-1).to(torch.int32) + 1
    top_logits, top_ids = top(logits, k)
    return (chosen - normaliser)[:, 0], ranks, top_ids.to(torch.int32), top_logits - normaliser
