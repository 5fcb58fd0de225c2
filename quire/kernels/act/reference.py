"""Activations in plain torch: the oracle. Arithmetic in float32, or in float64 for float64 inputs."""

from __future__ import annotations

import math

import torch

TOLERANCE = {torch.float64: 1e-12, torch.float32: 4e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""dtype → largest |kernel - float64 reference| / (1 + |reference|): two roundings, and what 1 + erf loses."""


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """silu(gate), rounded to the dtype as transformers does, times up."""
    gate, up = x.chunk(2, dim=-1)
    wide = gate.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.sigmoid(wide)).to(x.dtype) * up


def activate(x: torch.Tensor, activation: str, gated: bool) -> torch.Tensor:
    """The activation, rounded to the dtype as transformers does, times up where gated."""
    gate, up = x.chunk(2, dim=-1) if gated else (x, None)
    wide = gate.to(torch.promote_types(x.dtype, torch.float32))
    acted = _in_float(wide, activation).to(x.dtype)
    return acted if up is None else acted * up


def _in_float(x: torch.Tensor, activation: str) -> torch.Tensor:
    match activation:
        case "silu":
            return x * torch.sigmoid(x)
        case "gelu":
            return 0.5 * x * (1 + torch.erf(x * math.sqrt(0.5)))
        case "gelu_tanh":
            return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
        case "relu":
            return x.clamp(min=0)
        case "relu2":
            return x.clamp(min=0).square()
        case _:
            raise ValueError(f"unknown activation {activation!r}")
