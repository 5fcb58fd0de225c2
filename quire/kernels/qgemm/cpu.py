"""Packed linear layers on CPU, in the native library: float32, bfloat16 and float16."""

from __future__ import annotations

import ctypes

import torch

from quire.kernels import native
from quire.kernels.gemm import Norm
from quire.kernels.qgemm import rounding
from quire.kernels.qgemm import weight as weights
from quire.kernels.qgemm.weight import SCHEMES, PackedWeight

_P, _I, _L = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
NOTHING, ADD, SILU_MUL, WIDEN = range(4)
"""QuireThen in csrc/cpu/quire_cpu.h."""
INT8, NIBBLES, F32, BF16, F16, BYTES = range(6)
"""QuireFormat in csrc/cpu/quire_cpu.h."""
FLOAT_FORMATS = {"float32": F32, "bfloat16": BF16, "float16": F16}


class NativeMatrix(ctypes.Structure):
    """QuireMatrix in csrc/cpu/quire_cpu.h."""

    _fields_ = (
        *((name, _P) for name in ("data", "scales", "bias", "next")),
        ("n", _L), ("k", _L), ("format", _I), ("group", _I), ("unit", ctypes.c_float), ("table", ctypes.c_uint8 * 16),
    )  # fmt: skip


class NativeLinear(ctypes.Structure):
    """QuireLinear in csrc/cpu/quire_cpu.h."""

    _fields_ = (
        *((name, _P) for name in ("matrix", "x", "norm", "out")),
        *((name, _L) for name in ("m", "x_row", "out_row")),
        ("eps", ctypes.c_float),
        *((name, _I) for name in ("dtype", "then", "n_threads")),
    )


class _Pack(ctypes.Structure):
    """QuirePack in csrc/cpu/quire_cpu.h."""

    _fields_ = (
        *((name, _P) for name in ("weight", "data", "scales")),
        *((name, _L) for name in ("n", "k", "row")),
        *((name, _I) for name in ("dtype", "bits", "group", "n_threads")),
        ("unit", ctypes.c_float), ("table", ctypes.c_float * 16),
    )  # fmt: skip


def matrix(packed: PackedWeight, bias: torch.Tensor | None) -> NativeMatrix:
    """The weight as C sees it; it points into `packed` and `bias`, which must be contiguous."""
    address = None if bias is None else bias.data_ptr()
    group, form = 0, FLOAT_FORMATS.get(packed.scheme, INT8)
    if packed.scheme in SCHEMES and SCHEMES[packed.scheme].group:
        group, form = SCHEMES[packed.scheme].group, BYTES if SCHEMES[packed.scheme].bits == 8 else NIBBLES
    table = (ctypes.c_uint8 * 16)(*(value + 128 for value in packed.table))
    return NativeMatrix(
        packed.data.data_ptr(), packed.scales.data_ptr(), address, None, packed.n, packed.k, form, group,
        packed.unit, table,
    )  # fmt: skip


def pack(weight: torch.Tensor, scheme: str, unit: float) -> PackedWeight:
    """See op.py; weight: finite. unit: for scales of groups."""
    form = SCHEMES[scheme]
    if not form.group:
        return weights.pack(weight, scheme, unit)
    weight = weight.detach() if weight.stride(1) == 1 else weight.detach().contiguous()
    n, k = weight.shape
    packed = weights.empty(scheme, n, k, unit, rounding.CODEBOOK if form.bits == 4 else ())
    call = _Pack(
        weight.data_ptr(), packed.data.data_ptr(), packed.scales.data_ptr(), *weight.shape, weight.stride(0),
        native.DTYPES[weight.dtype], form.bits, form.group, torch.get_num_threads(), unit,
        (ctypes.c_float * 16)(*packed.table),
    )  # fmt: skip
    native.required().quire_pack(ctypes.byref(call))
    return packed


def linear(
    x: torch.Tensor,
    packed: PackedWeight,
    bias: torch.Tensor | None = None,
    norm: Norm | None = None,
    residual: torch.Tensor | None = None,
    silu_mul: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See op.py."""
    then, result = NOTHING, out
    if silu_mul:
        then = SILU_MUL
    elif residual is not None:
        then, result = ADD, residual
    elif out is not None and out.dtype != x.dtype:
        then = WIDEN
    if result is None:
        result = x.new_empty(len(x), packed.n // 2 if silu_mul else packed.n)
    bias = None if bias is None else bias.contiguous()
    weight, eps = (None, 0.0) if norm is None else (norm[0].contiguous(), norm[1])
    call = NativeLinear(
        ctypes.addressof(packed_matrix := matrix(packed, bias)), x.data_ptr(),
        None if weight is None else weight.data_ptr(), result.data_ptr(),
        len(x), x.stride(0), result.stride(0), eps, native.DTYPES[x.dtype], then, torch.get_num_threads(),
    )  # fmt: skip
    native.required().quire_linear(ctypes.byref(call))
    del packed_matrix
    return result
