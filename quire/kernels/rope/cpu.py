"""Rotary embedding on CPU: the native library, in place, for float32, bfloat16, float16, else the torch reference."""

from __future__ import annotations

import torch

from quire.kernels import native
from quire.kernels.rope import reference


def apply_rope(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See op.py. q and k are changed in place."""
    library = native.library()
    plain = cos_sin.dtype == torch.float32 and cos_sin.is_contiguous() and positions.is_contiguous()
    if library is None or q.dtype not in native.DTYPES or not plain:
        return reference.apply_rope(q, k, positions, cos_sin)
    library.quire_rope(
        native.DTYPES[q.dtype], q.data_ptr(), q.stride(0), q.stride(1), q.shape[1],
        k.data_ptr(), k.stride(0), k.stride(1), k.shape[1], q.shape[0],
        positions.data_ptr(), positions.dtype == torch.int64, cos_sin.data_ptr(), cos_sin.shape[1],
        torch.get_num_threads(),
    )  # fmt: skip
    return q, k
