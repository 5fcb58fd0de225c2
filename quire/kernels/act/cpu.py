"""Activations on CPU: SwiGLU's in the native library for float32, bfloat16 and float16, the others in torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
import torch.nn.functional as F

from quire.kernels import native
from quire.kernels.act import reference


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """See op.py."""
    library = native.library()
    if library is None or x.dtype not in native.DTYPES:
        return reference.silu_mul(x)
    n, width = x.shape
    out = torch.empty(n, width // 2, dtype=x.dtype)
    library.quire_silu_mul(
        native.DTYPES[x.dtype], x.data_ptr(), x.stride(0), out.data_ptr(), n, width // 2, torch.get_num_threads()
    )
    return out


_TORCH: Final[dict[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


def activate(x: torch.Tensor, activation: str, gated: bool) -> torch.Tensor:
    """See op.py."""
    if not gated:
        return _TORCH[activation](x)
    gate, up = x.chunk(2, dim=-1)
    return _TORCH[activation](gate).mul_(up)
