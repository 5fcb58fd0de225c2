"""Activations by torch's own operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
import torch.nn.functional as F

_FUNCTIONS: Final[dict[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


def activate(x: torch.Tensor, activation: str, gated: bool) -> torch.Tensor:
    """See op.py."""
    if not gated:
        return _FUNCTIONS[activation](x)
    gate, up = x.chunk(2, dim=-1)
    return _FUNCTIONS[activation](gate).mul_(up)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """See op.py."""
    return torch.sigmoid(x)
