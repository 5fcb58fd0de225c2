"""Attention states to be joined, some of which saw nothing and hold anything."""

from __future__ import annotations

import torch

State = tuple[torch.Tensor, torch.Tensor]


def random_states(n: int, shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu") -> State:
    """n states stacked in front: outs [n, *shape], lses without the last dimension, of very different weight."""
    generator = torch.Generator().manual_seed(n)
    lses = 30 * torch.randn(n, *shape[:-1], generator=generator)
    outs = torch.randn(n, *shape, generator=generator)
    nothing = torch.rand(lses.shape, generator=generator) < 0.3
    lses[nothing], outs[nothing] = float("-inf"), float("nan")
    return outs.to(device, dtype), lses.to(device)
