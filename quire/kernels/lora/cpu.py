"""Products with adapters on a CPU, in the native library: both small ones of all rows in one call."""

from __future__ import annotations

import ctypes

import numpy as np
import torch

from quire.kernels import native
from quire.kernels.gemm import Norm
from quire.kernels.lora.places import NativeLora, Places


def add_lines(x: torch.Tensor, adapters: Places, places: np.ndarray, y: torch.Tensor, norm: Norm | None = None) -> None:
    """See op.py. What lies between the two products is float32."""
    weight = None if norm is None else norm[0].contiguous()
    call = native_lora(x, adapters, y, None if norm is None or weight is None else (weight, norm[1]))
    own = np.ascontiguousarray(places, np.int32)
    call.places, call.m, call.n_threads = own.ctypes.data, len(x), torch.get_num_threads()
    native.required().quire_lora(ctypes.byref(call))


def native_lora(x: torch.Tensor, adapters: Places, y: torch.Tensor, norm: Norm | None) -> NativeLora:
    """The call, of rows that are still to be said; what it points to must stay."""
    weight, eps = (None, 0.0) if norm is None else norm
    return NativeLora(
        ctypes.addressof(adapters.table), x.data_ptr(), None if weight is None else weight.data_ptr(), y.data_ptr(),
        None, 0, *adapters.shape, x.stride(0), y.stride(0), len(adapters), eps, native.DTYPES[x.dtype], 0,
    )  # fmt: skip
