"""Quantised linear layers on CPU: the native library, else the torch reference (slow; `native.explain()` says so)."""

from __future__ import annotations

import ctypes

import torch

from quire.kernels import native
from quire.kernels.qgemm import reference
from quire.kernels.qgemm.weight import SCHEMES, PackedWeight

_P, _I, _L = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64


class _Arguments(ctypes.Structure):
    """QuireQlinearArgs in csrc/cpu/quire_cpu.h."""

    _fields_ = (
        *((name, _P) for name in ("x", "weight", "scales", "bias", "out")),
        *((name, _L) for name in ("m", "n", "k", "x_row")),
        *((name, _I) for name in ("dtype", "scheme", "n_threads")),
    )


def linear(x: torch.Tensor, packed: PackedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """See op.py."""
    library = native.library()
    if library is None or x.dtype not in native.DTYPES:
        return reference.linear(x, packed, bias)
    out = torch.empty(x.shape[0], packed.n, dtype=x.dtype)
    bias = None if bias is None else bias.contiguous()
    arguments = _Arguments(
        x.data_ptr(), packed.data.data_ptr(), packed.scales.data_ptr(), None if bias is None else bias.data_ptr(),
        out.data_ptr(), x.shape[0], packed.n, packed.k, x.stride(0), native.DTYPES[x.dtype],
        SCHEMES.index(packed.scheme), torch.get_num_threads(),
    )  # fmt: skip
    library.quire_qlinear(ctypes.byref(arguments))
    return out
