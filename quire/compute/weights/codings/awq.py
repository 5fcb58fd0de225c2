"""AWQ's integers: in words along the outputs, [k, n] as they are multiplied, in an order of its own in each word.

Layout: awq/modules/linear/gemm.py, method `from_linear`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch

from quire.compute.schemes.coded import Coded
from quire.compute.weights.codings.layout import FLOATS, Kinds, Reader, n_groups, unpack, words_of
from quire.config.codings import Coding

WEIGHT, ZEROS, SCALES = "qweight", "qzeros", "scales"
PLACES: Final = (0, 4, 1, 5, 2, 6, 3, 7)
"""Of 8 outputs, in a word from its lowest bits on."""


def _allowed(coding: Coding, n: int, k: int) -> Kinds:
    groups, words = n_groups(coding, k), words_of(n, coding.bits)
    return {
        WEIGHT: (((k, words),), ("I32",)),
        ZEROS: (((groups, words),), ("I32",)),
        SCALES: (((groups, n),), FLOATS),
    }


def _read(coding: Coding, tensors: Mapping[str, torch.Tensor], n: int, k: int) -> Coded:
    codes, zeros = (unpack(tensors[kind], coding.bits, n, PLACES).t().contiguous() for kind in (WEIGHT, ZEROS))
    return Coded(codes, tensors[SCALES].t(), coding.group or k, zeros)


AWQ = Reader((WEIGHT, ZEROS, SCALES), lambda _: (WEIGHT, ZEROS, SCALES), _allowed, _read)
