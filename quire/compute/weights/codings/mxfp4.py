"""MXFP4 of gpt-oss: two numbers a byte, the lower half first, in blocks of 32 with a power of two each.

Format: OCP Microscaling Formats v1.0; layout: `convert_moe_packed_tensors` of transformers. All experts of a layer are
in one tensor, each of them [outputs, blocks, 16].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch

from quire.compute.schemes.coded import Coded
from quire.compute.weights.codings.layout import Kinds, Reader
from quire.config.codings import Coding

BLOCKS, SCALES = "_blocks", "_scales"
E2M1: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def _allowed(coding: Coding, n: int, k: int) -> Kinds:
    blocks = -(-k // coding.group)
    return {BLOCKS: (((n, blocks, coding.group // 2),), ("U8",)), SCALES: (((n, blocks),), ("U8",))}


def _read(coding: Coding, tensors: Mapping[str, torch.Tensor], n: int, k: int) -> Coded:
    octets = tensors[BLOCKS].flatten(1)
    codes = torch.stack((octets & 15, octets >> 4), dim=2).flatten(1)[:, :k]
    return Coded(codes, tensors[SCALES].view(torch.float8_e8m0fnu), coding.group, table=E2M1)


MXFP4 = Reader((BLOCKS, SCALES), lambda _: (BLOCKS, SCALES), _allowed, _read)
