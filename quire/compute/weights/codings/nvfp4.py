"""NVFP4: two numbers a byte (e2m1), the lower half first, an e4m3 scale for each 16 of them and one for the tensor.

Layouts: compressed_tensors/compressors/nvfp4, whose scale of the tensor divides the others; ModelOpt's
torch/quantization/qtensor/nvfp4_tensor.py, where it multiplies them. Scales of activations are not used: these are not
rounded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch

from quire.compute.schemes.coded import Coded
from quire.compute.weights.codings.layout import Kinds, Reader, n_groups, unpack
from quire.compute.weights.header import Entry
from quire.config.codings import Coding
from quire.kernels.mxfp4.weight import VALUES

SCALE: Final = "weight_scale"
PACKED, DIVISOR = "weight_packed", "weight_global_scale"
"""As compressed-tensors calls codes and the tensor's scale."""
WEIGHT, FACTOR = "weight", "weight_scale_2"
"""As ModelOpt does."""
INPUTS: Final = ("input_global_scale", "input_scale")


def _allowed(coding: Coding, n: int, k: int) -> Kinds:
    codes, one = (((n, -(-k // 2)),), ("U8",)), (((), (1,)), ("F32",))
    return {
        SCALE: (((n, n_groups(coding, k)),), ("F8_E4M3",)),
        **dict.fromkeys((PACKED, WEIGHT), codes),
        **dict.fromkeys((DIVISOR, FACTOR), one),
    }


def _more(coding: Coding, entries: Mapping[str, Entry], n: int, k: int) -> str:
    if {PACKED, DIVISOR, WEIGHT, FACTOR} & set(entries) in ({PACKED, DIVISOR}, {WEIGHT, FACTOR}):
        return ""
    return f"it must have either {PACKED} and {DIVISOR}, or {WEIGHT} and {FACTOR}"


def _read(coding: Coding, tensors: Mapping[str, torch.Tensor], n: int, k: int) -> Coded:
    codes, of_tensor = (WEIGHT, FACTOR) if WEIGHT in tensors else (PACKED, DIVISOR)
    one, largest = tensors[of_tensor].double().reshape(()), tensors[SCALE].float().abs().max()
    factor = one if of_tensor == FACTOR else 1 / one
    if not bool((largest * factor).float().isfinite() & one.isfinite()):
        raise ValueError(f"its scales are NaN or infinite, with {of_tensor} or without")
    return Coded(
        unpack(tensors[codes], coding.bits, k), tensors[SCALE], coding.group, table=VALUES, factor=float(factor)
    )


NVFP4 = Reader((SCALE, PACKED, DIVISOR, FACTOR, *INPUTS, WEIGHT), lambda _: (SCALE,), _allowed, _read, _more)
