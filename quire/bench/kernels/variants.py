"""The variants that are measured and explained by name, with example parameters of a sensible size."""

from __future__ import annotations

from collections.abc import Callable

import torch

from quire.kernels.attention import variants
from quire.kernels.attention.plan import Heads
from quire.kernels.attention.variant import Variant

CAP, SIGMOID_BIAS = 30.0, -7.0
N_FIRST = 4

Maker = Callable[[Heads, torch.device, int, int], Variant]
"""(heads, device, rows of the batch, longest kv_len) → variant."""


def _scale(heads: Heads) -> float:
    return heads.head_dim**-0.5


def _causal(heads: Heads, device: torch.device, n_rows: int, width: int) -> Variant:
    return variants.causal(_scale(heads))


def _soft_cap(heads: Heads, device: torch.device, n_rows: int, width: int) -> Variant:
    return variants.soft_cap(_scale(heads), CAP)


def _window(heads: Heads, device: torch.device, n_rows: int, width: int) -> Variant:
    """A quarter of the longest sequence, and the first positions."""
    return variants.causal(_scale(heads), window=max(1, width // 4), n_first=N_FIRST)


def _sinks(heads: Heads, device: torch.device, n_rows: int, width: int) -> Variant:
    return variants.learned_sinks(_scale(heads), torch.randn(heads.n_q_heads, device=device))


def _sigmoid(heads: Heads, device: torch.device, n_rows: int, width: int) -> Variant:
    return variants.sigmoid_attention(_scale(heads), SIGMOID_BIAS)


def _alibi(heads: Heads, device: torch.device, n_rows: int, width: int) -> Variant:
    slopes = torch.exp2(-8.0 * torch.arange(1, heads.n_q_heads + 1, dtype=torch.float32) / heads.n_q_heads)
    return variants.alibi(_scale(heads), slopes.to(device))


def _mask(heads: Heads, device: torch.device, n_rows: int, width: int) -> Variant:
    """Any mask: here three keys of four, at random."""
    return variants.custom_mask(_scale(heads), torch.rand(n_rows, width, device=device) < 0.75)


def _rotary(heads: Heads, device: torch.device, n_rows: int, width: int) -> Variant:
    angles = torch.arange(width)[:, None] * 10000.0 ** (-torch.arange(0, heads.head_dim, 2) / heads.head_dim)
    return variants.rotary(_scale(heads), torch.cat((angles.cos(), angles.sin()), dim=-1).to(device))


NAMED: dict[str, Maker] = {
    "causal": _causal,
    "soft_cap": _soft_cap,
    "window": _window,
    "sinks": _sinks,
    "sigmoid": _sigmoid,
    "alibi": _alibi,
    "mask": _mask,
    "rotary": _rotary,
}
