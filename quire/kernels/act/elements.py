"""Functions of elements on CPU in the native library: where rows are to be alone.

torch computes the last elements of an array, and of a thread's part of it, by other instructions than those before.
"""

from __future__ import annotations

from typing import Final

import torch

from quire.kernels import native
from quire.kernels.catalog import Slower, unless_alone

_SIGMOID, _SOFTPLUS, _EXP, _SILU, _GELU_TANH = range(5)
"""QuireFunction in csrc/cpu/quire_cpu.h."""

BY_PLACE: Final = {"silu": _SILU, "gelu_tanh": _GELU_TANH}
"""Activations whose bits, as torch computes them, depend on where an element lies."""


def obstacle(_: torch.Tensor, activation: str = "", *__: object) -> str | None:
    """Why this is not for such rows, or this activation, or None."""
    if activation and activation not in BY_PLACE:
        return Slower(f"torch computes every element of {activation} alike")
    return unless_alone()


def activate(x: torch.Tensor, activation: str, gated: bool) -> torch.Tensor:
    """See op.py."""
    gate, up = x.chunk(2, dim=-1) if gated else (x, None)
    acted = _apply(gate, BY_PLACE[activation])
    return acted if up is None else acted.mul_(up)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """See op.py."""
    return _apply(x, _SIGMOID)


def softplus(x: torch.Tensor) -> torch.Tensor:
    """log(1 + e^x), likewise."""
    return _apply(x, _SOFTPLUS)


def exp(x: torch.Tensor) -> torch.Tensor:
    """e^x, likewise."""
    return _apply(x, _EXP)


def _apply(x: torch.Tensor, function: int) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=x.dtype)
    native.required().quire_apply(
        native.DTYPES[x.dtype], function, x.data_ptr(), x.stride(0), out.data_ptr(), *x.shape, torch.get_num_threads()
    )
    return out
