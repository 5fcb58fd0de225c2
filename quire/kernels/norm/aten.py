"""LayerNorm by torch's own operation, on CPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def obstacle(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> str | None:
    """Why torch's operation cannot run this, or None."""
    if (weight is not None and weight.dim() == 2) or (bias is not None and bias.dim() == 2):
        return "each head has a weight or a bias of its own: torch's LayerNorm has one for all rows"
    return None


def layer_norm(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """See op.py."""
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
