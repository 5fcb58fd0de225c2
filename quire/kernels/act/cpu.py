"""Gated activation on CPU: the native library for float32, bfloat16 and float16, else the torch reference."""

from __future__ import annotations

import torch

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
