"""A byte for each weight, e4m3 or an integer, and scales of the tensor, of outputs, of groups or of blocks.

DeepSeek and transformers call a scale by which weights are multiplied weight_scale_inv, others weight_scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch

from quire.compute.schemes.coded import Coded
from quire.compute.weights.codings.layout import FLOATS, Kinds, Reader, n_groups
from quire.compute.weights.header import Entry
from quire.config.codings import Coding

WEIGHT, ZERO = "weight", "weight_zero_point"
SCALES: Final = ("weight_scale_inv", "weight_scale")
INPUTS: Final = ("input_scale", "activation_scale")


def _allowed(coding: Coding, n: int, k: int) -> Kinds:
    if coding.block_rows:
        shapes: tuple[tuple[int, ...], ...] = ((-(-n // coding.block_rows), n_groups(coding, k)),)
    elif coding.group:
        shapes = ((n, n_groups(coding, k)),)
    else:
        shapes = (), (1,), (1, 1), (n,), (n, 1)
    scales = shapes, (*FLOATS, "F8_E8M0")
    one = (), (1,)
    return {
        WEIGHT: (((n, k),), ("F8_E4M3",) if coding.is_float else ("I8",)),
        **dict.fromkeys(SCALES, scales),
        **dict.fromkeys(INPUTS, (one, FLOATS)),
        ZERO: (shapes, ("I8",)),
    }


def _more(coding: Coding, entries: Mapping[str, Entry], n: int, k: int) -> str:
    wanted = (SCALES, INPUTS) if coding.static_inputs else (SCALES,)
    lacking = next((kinds for kinds in wanted if not any(kind in entries for kind in kinds)), ())
    return f"it has neither {' nor '.join(lacking)}" if lacking else ""


def _read(coding: Coding, tensors: Mapping[str, torch.Tensor], n: int, k: int) -> Coded:
    scales = _rows(next(tensors[kind] for kind in SCALES if kind in tensors), coding, n)
    zeros = None if coding.symmetric else _rows(tensors[ZERO], coding, n)
    inputs = next((tensors[kind].float().reshape(1) for kind in INPUTS if kind in tensors), None)
    return Coded(tensors[WEIGHT], scales, coding.group or k, zeros, input_scale=inputs)


def _rows(scales: torch.Tensor, coding: Coding, n: int) -> torch.Tensor:
    """A row of scales for each output."""
    if coding.block_rows:
        return scales.float().repeat_interleave(coding.block_rows, dim=0)[:n]
    return scales.expand(n, -1) if scales.dim() == 2 else scales.reshape(-1, 1).expand(n, 1)


SCALED = Reader(
    (*SCALES, ZERO, *INPUTS, WEIGHT),
    lambda coding: (WEIGHT, *(() if coding.symmetric else (ZERO,))), _allowed, _read, _more,
)  # fmt: skip
