"""GPTQ's integers: in words along the inputs, [k, n] as they are multiplied, zero points in words along the outputs.

Layout: auto_gptq/nn_modules/qlinear, method `pack`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from quire.compute.schemes.coded import Coded
from quire.compute.weights.codings.layout import FLOATS, Kinds, Reader, check_order, n_groups, unpack, words_of
from quire.config.codings import Coding

WEIGHT, ZEROS, SCALES, INDEX = "qweight", "qzeros", "scales", "g_idx"


def _needed(coding: Coding) -> tuple[str, ...]:
    return WEIGHT, SCALES, *(() if coding.symmetric else (ZEROS,)), *((INDEX,) if coding.act_order else ())


def _allowed(coding: Coding, n: int, k: int) -> Kinds:
    groups = n_groups(coding, k)
    return {
        WEIGHT: (((words_of(k, coding.bits), n),), ("I32",)),
        ZEROS: (((groups, words_of(n, coding.bits)),), ("I32",)),
        SCALES: (((groups, n),), FLOATS),
        INDEX: (((k,),), ("I32", "I64")),
    }


def _read(coding: Coding, tensors: Mapping[str, torch.Tensor], n: int, k: int) -> Coded:
    bits, middle = coding.bits, 1 << coding.bits - 1
    codes, scales = unpack(tensors[WEIGHT].t(), bits, k), tensors[SCALES].t()
    zeros = None
    if ZEROS in tensors:
        stored = unpack(tensors[ZEROS], bits, n).t()
        zeros = stored + coding.zero_less & (1 << bits) - 1
        if coding.symmetric:
            if not bool((zeros == middle).all()):
                raise ValueError(f"sym is true, but {ZEROS} has zero points beside {middle}")
            zeros = None
    check_order(tensors.get(INDEX), INDEX, coding, k, "desc_act = true")
    groups = tensors[INDEX].long() if coding.act_order else None
    if groups is not None and not 0 <= int(groups.min()) <= int(groups.max()) < scales.shape[1]:
        raise ValueError(f"{INDEX} names groups beyond the {scales.shape[1]} that there are")
    return Coded(codes, scales, coding.group or k, zeros, 0 if zeros is not None else middle, groups)


GPTQ = Reader((WEIGHT, ZEROS, SCALES, INDEX), _needed, _allowed, _read)
