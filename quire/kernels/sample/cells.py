"""The form in which logprobs leave a device: pairs of an int32 and a float32, the bits of both in one int32 tensor."""

from __future__ import annotations

import torch


def pack(chosen: torch.Tensor, ranks: torch.Tensor, top_ids: torch.Tensor, top_logprobs: torch.Tensor) -> torch.Tensor:
    """int32 [r, 1 + k, 2]: a row's rank and log-probability of its target, then id and log-probability of the k most
    probable tokens. chosen, ranks: [r]; top_ids, top_logprobs: [r, k]."""
    cells = torch.empty((len(ranks), 1 + top_ids.shape[1], 2), dtype=torch.int32, device=ranks.device)
    values = cells.view(torch.float32)
    cells[:, 0, 0], values[:, 0, 1], cells[:, 1:, 0], values[:, 1:, 1] = ranks, chosen, top_ids, top_logprobs
    return cells
