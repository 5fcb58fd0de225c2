"""SwiGLU's activation on CPU, in the native library: float32, bfloat16 and float16."""

from __future__ import annotations

import torch

from quire.kernels import native


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """See op.py."""
    n, width = x.shape
    out = torch.empty(n, width // 2, dtype=x.dtype)
    native.required().quire_silu_mul(
        native.DTYPES[x.dtype], x.data_ptr(), x.stride(0), out.data_ptr(), n, width // 2, torch.get_num_threads()
    )
    return out
