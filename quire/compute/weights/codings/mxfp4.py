"""MXFP4 of gpt-oss: two numbers a byte, the lower half first, in blocks of 32 with a power of two each.

Format: OCP Microscaling Formats v1.0; layout: `convert_moe_packed_tensors` of transformers. All experts of a layer are
in one tensor, each of them [outputs, blocks, 16].
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from quire.compute.schemes.coded import Coded
from quire.compute.weights.codings.layout import Kinds, Reader, unpack
from quire.config.codings import Coding
from quire.kernels.mxfp4.weight import VALUES

BLOCKS, SCALES = "_blocks", "_scales"


def _allowed(coding: Coding, n: int, k: int) -> Kinds:
    blocks = -(-k // coding.group)
    return {BLOCKS: (((n, blocks, coding.group // 2),), ("U8",)), SCALES: (((n, blocks),), ("U8",))}


def _read(coding: Coding, tensors: Mapping[str, torch.Tensor], n: int, k: int) -> Coded:
    codes = unpack(tensors[BLOCKS].flatten(1), coding.bits, k)
    return Coded(codes, tensors[SCALES].view(torch.float8_e8m0fnu), coding.group, table=VALUES)


MXFP4 = Reader((BLOCKS, SCALES), lambda _: (BLOCKS, SCALES), _allowed, _read)
