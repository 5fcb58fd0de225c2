"""Public activations. Checks shapes and picks the implementation."""

from __future__ import annotations

from typing import Final

import torch

from quire.kernels.selector import select

ACTIVATIONS: Final = ("silu", "gelu", "gelu_tanh", "relu", "relu2")


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """silu(x[:, :f]) * x[:, f:] (SwiGLU, Shazeer 2020, eq. 6 without its matrices).

    x: [n, 2 f], gate first, last dimension contiguous. Returns a new [n, f] of x's dtype. Raises ValueError otherwise.
    """
    if x.dim() != 2 or x.shape[1] % 2 or x.stride(1) != 1:
        raise ValueError(f"x {tuple(x.shape)} must be [n, 2 f] with contiguous rows")
    y: torch.Tensor = select("act", "silu_mul", x)(x)
    return y


def activate(x: torch.Tensor, activation: str, *, gated: bool) -> torch.Tensor:
    """act(x), or act(x[:, :f]) * x[:, f:] where gated (Shazeer 2020, eq. 6 without its matrices).

    x: [n, f], or [n, 2 f] with the gate first, last dimension contiguous; activation: one of `ACTIVATIONS`, gelu by the
    error function, gelu_tanh by its usual approximation (Hendrycks and Gimpel 2016, section 2), relu2 = relu squared.
    Returns a new [n, f] of x's dtype; the activation is rounded to it before the product. Raises ValueError otherwise.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation {activation!r} must be one of {', '.join(ACTIVATIONS)}")
    if gated and activation == "silu":
        return silu_mul(x)
    if x.dim() != 2 or (gated and x.shape[1] % 2) or x.stride(1) != 1:
        raise ValueError(f"x {tuple(x.shape)} must be [n, f] or [n, 2 f] with contiguous rows")
    y: torch.Tensor = select("act", "activate", x, activation)(x, activation, gated)
    return y


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """1 / (1 + exp(-x)) of each element of x [n, f], last dimension contiguous: new, of its dtype."""
    y: torch.Tensor = select("act", "sigmoid", x)(x)
    return y
