"""compressed-tensors' pack-quantized: integers from the lowest on in words of 32 bits, along the inputs.

Layout: compressed_tensors/compressors/pack_quantized. Codes are those integers plus half of their range.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from quire.compute.schemes.coded import Coded
from quire.compute.weights.codings.layout import FLOATS, Kinds, Reader, check_order, n_groups, unpack, words_of
from quire.config.codings import Coding

WEIGHT, SCALE, ZERO, INDEX = "weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx"


def _needed(coding: Coding) -> tuple[str, ...]:
    return WEIGHT, SCALE, *(() if coding.symmetric else (ZERO,)), *((INDEX,) if coding.act_order else ())


def _allowed(coding: Coding, n: int, k: int) -> Kinds:
    groups = n_groups(coding, k)
    return {
        WEIGHT: (((n, words_of(k, coding.bits)),), ("I32",)),
        SCALE: (((n, groups), *(((1,), (n,)) if groups == 1 else ())), FLOATS),
        ZERO: (((words_of(n, coding.bits), groups), (n, groups)), ("I32", "I8")),
        INDEX: (((k,),), ("I32", "I64")),
        "weight_shape": (((2,),), ("I64", "I32")),
    }


def _read(coding: Coding, tensors: Mapping[str, torch.Tensor], n: int, k: int) -> Coded:
    middle = 1 << coding.bits - 1
    codes, scales = unpack(tensors[WEIGHT], coding.bits, k), tensors[SCALE]
    scales = (scales.reshape(-1, 1) if scales.dim() == 1 else scales).expand(n, n_groups(coding, k))
    zeros = None
    if not coding.symmetric:
        zeros = tensors[ZERO]
        if zeros.dtype is torch.int32:
            zeros = unpack(zeros.t(), coding.bits, n).t()
        else:
            zeros = zeros.to(torch.int16) + middle
    check_order(tensors.get(INDEX), INDEX, coding, k, "actorder = 'group'")
    groups = None
    if coding.act_order:
        groups = tensors[INDEX].long()
        if not 0 <= int(groups.min()) <= int(groups.max()) < scales.shape[1]:
            raise ValueError(f"{INDEX} names groups beyond the {scales.shape[1]} that there are")
    return Coded(codes, scales, coding.group or k, zeros, 0 if zeros is not None else middle, groups)


PACKED = Reader((WEIGHT, SCALE, ZERO, INDEX, "weight_shape", "input_scale"), _needed, _allowed, _read)
