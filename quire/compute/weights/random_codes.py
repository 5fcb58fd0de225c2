"""Random matrices in the codings that schemes hold: as a checkpoint's would be in size, made where they will live.

Owns numbers alone. Invariant: they spread about zero with a standard deviation near `SCALE`, and none is NaN or
infinite. All codes are equally likely, but those that are no numbers, and the lowest of integers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final

import torch

from quire.compute.schemes.coded import Coded, Source
from quire.compute.weights.codings.layout import n_groups
from quire.compute.weights.pieces import TORCH_DTYPES
from quire.config.codings import Layout
from quire.kernels.e4m3 import E4M3
from quire.kernels.mxfp4.weight import OFFSET, VALUES

SCALE: Final = 0.02
"""Standard deviation of matrices, as models are initialised."""
SPREAD: Final = 0.25
"""Scales of groups are up to so much of themselves smaller or larger."""
EXPONENTS: Final = (-8, -7)
"""Powers of two that are as likely as one another: with e2m1 they make numbers of about `SCALE`."""
NV_SCALE: Final = 64.0
"""Of e4m3 scales of NVFP4, amid those that have all their bits."""
INPUT_SCALE: Final = 1 / 32
"""Of what is multiplied by e4m3: up to 14 is rounded, more is cut."""


def random_coded(source: Source, n: int, k: int, generator: torch.Generator) -> Coded:
    """A matrix [n, k] on the device of `generator`. KeyError: no scheme holds this layout."""
    return MAKERS[source.coding.layout](source, n, k, generator)


def _integers(source: Source, n: int, k: int, generator: torch.Generator) -> Coded:
    coding, middle = source.coding, 1 << source.coding.bits - 1
    codes = _bytes(n, k, 1, 2 * middle, generator)  # with 0 there would be more below the middle than above it
    scales = _scales(n, n_groups(coding, k), SCALE / _spread_of(2 * middle - 1), generator)
    scales = scales.to(TORCH_DTYPES[source.scale_dtype])
    zeros = None if coding.symmetric else torch.full_like(scales, middle, dtype=torch.uint8)
    groups = None
    if coding.act_order:  # one order for all matrices that read the same inputs
        groups = torch.randperm(k, generator=torch.Generator().manual_seed(k)) // (coding.group or k)
    return Coded(codes, scales, coding.group or k, zeros, middle if coding.symmetric else 0, groups)


def _scaled(source: Source, n: int, k: int, generator: torch.Generator) -> Coded:
    coding = source.coding
    if coding.is_float:
        codes = _bytes(n, k, 0, 254, generator)
        codes += codes >= 0x7F  # steps over the positive NaN, and ends before the negative one
        codes, spread = codes.view(E4M3), _spread_of_e4m3()
    else:
        codes = _bytes(n, k, -127, 128, generator)
        spread = _spread_of(255)
    rows = coding.block_rows or 1
    scales = _scales(-(-n // rows), n_groups(coding, k), SCALE / spread, generator)
    scales = scales.repeat_interleave(rows, dim=0)[:n] if rows > 1 else scales
    inputs = torch.full((1,), INPUT_SCALE, device=generator.device) if coding.static_inputs else None
    return Coded(codes, scales, coding.group or k, input_scale=inputs)


def _mxfp4(source: Source, n: int, k: int, generator: torch.Generator) -> Coded:
    low, high = EXPONENTS
    exponents = _bytes(n, n_groups(source.coding, k), OFFSET + low, OFFSET + high + 1, generator)
    codes = _bytes(n, k, 0, len(VALUES), generator)
    return Coded(codes, exponents.view(torch.float8_e8m0fnu), source.coding.group, table=VALUES)


def _nvfp4(source: Source, n: int, k: int, generator: torch.Generator) -> Coded:
    scales = _scales(n, n_groups(source.coding, k), NV_SCALE, generator).to(E4M3)
    spread = math.sqrt(sum(value * value for value in VALUES) / len(VALUES))
    codes = _bytes(n, k, 0, len(VALUES), generator)
    return Coded(codes, scales, source.coding.group, table=VALUES, factor=SCALE / spread / NV_SCALE)


MAKERS: Final[Mapping[Layout, Callable[[Source, int, int, torch.Generator], Coded]]] = {
    Layout.PACKED: _integers, Layout.GPTQ: _integers, Layout.AWQ: _integers, Layout.SCALED: _scaled,
    Layout.MXFP4: _mxfp4, Layout.NVFP4: _nvfp4,
}  # fmt: skip


def _bytes(n: int, k: int, first: int, end: int, generator: torch.Generator) -> torch.Tensor:
    """[n, k] whole numbers from first to end - 1: uint8, or int8 if some are negative."""
    dtype = torch.int8 if first < 0 else torch.uint8
    return torch.empty(n, k, dtype=dtype, device=generator.device).random_(first, end, generator=generator)


def _scales(n: int, groups: int, size: float, generator: torch.Generator) -> torch.Tensor:
    """float32 [n, groups] about `size`."""
    found = torch.rand(n, groups, generator=generator, device=generator.device)
    return found.mul_(2 * SPREAD).add_(1 - SPREAD).mul_(size)


def _spread_of(number: int) -> float:
    """Standard deviation of so many neighbouring integers."""
    return math.sqrt((number * number - 1) / 12)


def _spread_of_e4m3() -> float:
    values = torch.arange(0x7F, dtype=torch.uint8).view(E4M3).float()
    return float(values.square().mean().sqrt())
