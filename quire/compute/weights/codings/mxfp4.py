"""MXFP4: two numbers a byte (e2m1), the lower half first, in blocks of 32 with a power of two each.

Format: OCP Microscaling Formats v1.0. Layouts: `convert_moe_packed_tensors` of transformers, for gpt-oss: all experts
of a layer are in one tensor, each of them [outputs, blocks, 16]; compressed_tensors/compressors/mxfp4: a matrix
[outputs, inputs / 2]. Scales of activations are not used: these are not rounded.
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

BLOCKS, SCALES = "_blocks", "_scales"
"""As gpt-oss calls codes and exponents."""
PACKED, SCALE = "weight_packed", "weight_scale"
"""As compressed-tensors does."""
INPUTS: Final = ("input_global_scale",)


def _allowed(coding: Coding, n: int, k: int) -> Kinds:
    exponents = (((n, n_groups(coding, k)),), ("U8",))
    return {
        BLOCKS: (((n, n_groups(coding, k), coding.group // 2),), ("U8",)),
        PACKED: (((n, -(-k // 2)),), ("U8",)),
        **dict.fromkeys((SCALES, SCALE), exponents),
    }


def _more(coding: Coding, entries: Mapping[str, Entry], n: int, k: int) -> str:
    found = set(entries).difference(INPUTS)
    if found in ({BLOCKS, SCALES}, {PACKED, SCALE}):
        return ""
    return f"it has {' and '.join(sorted(found))}; it must have either {BLOCKS} and {SCALES}, or {PACKED} and {SCALE}"


def _read(coding: Coding, tensors: Mapping[str, torch.Tensor], n: int, k: int) -> Coded:
    codes, exponents = (PACKED, SCALE) if PACKED in tensors else (BLOCKS, SCALES)
    return Coded(
        unpack(tensors[codes].flatten(1), coding.bits, k), tensors[exponents].view(torch.float8_e8m0fnu), coding.group,
        table=VALUES,
    )  # fmt: skip


MXFP4 = Reader((BLOCKS, SCALES, PACKED, SCALE, *INPUTS), lambda _: (), _allowed, _read, _more)
