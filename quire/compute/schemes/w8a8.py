"""Weights of 8 bits, e4m3 or integers, whose products round activations to the same: a checkpoint's, or rounded here.

Owns what is stored and how it is cut. Does not own the numbers of products (`kernels/w8a8`). Invariant: scales of
outputs are kept one for each, so that parts of a matrix may have their own; blocks lie as the kernels want them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final

import torch

from quire.compute.schemes.coded import Coded, Source
from quire.compute.schemes.launched import Launched
from quire.compute.schemes.scheme import FilledScheme, MatrixScheme, Product, Stored
from quire.config.codings import Layout
from quire.config.parameters import Matrix
from quire.config.shares import Share, share
from quire.core.errors import ConfigError
from quire.kernels import moe, w8a8
from quire.kernels.e4m3 import E4M3, E4M3_MAX
from quire.kernels.hopper import converts_to_e4m3
from quire.kernels.w8a8 import BLOCK

MOST: Final = {E4M3: E4M3_MAX, torch.int8: 127}
"""The largest code."""


@dataclasses.dataclass(frozen=True)
class EightBits(FilledScheme):
    """As a checkpoint has them."""

    dtype: torch.dtype
    """int8 or e4m3."""
    blocks: bool = False
    """Of 128 outputs and inputs that share a scale; else outputs have one each."""
    static: bool = False
    """All that is multiplied by it is rounded with one stored scale."""
    keeps_matrix = False

    @property
    def name(self) -> str:
        """Value of --quantization."""
        return "fp8" if self.dtype is E4M3 else "int8"

    def stored(self, n: int, k: int) -> tuple[Stored, ...]:
        """See `WeightScheme`."""
        shape = (-(-n // BLOCK), -(-k // BLOCK)) if self.blocks else (n,)
        found = (Stored("weight", (n, k), self.dtype), Stored("scale", shape, torch.float32))
        return (*found, Stored("input_scale", (1,), torch.float32)) if self.static else found

    def cut(self, matrix: Matrix, rank: int, n_ranks: int) -> Share:
        """Between blocks."""
        step = BLOCK if self.blocks else 1
        mine = share(matrix, rank, n_ranks, row_step=step, column_step=step)
        starts = [first for rows in mine.rows for first, _ in rows]
        if any(first % step for first in starts):
            raise ConfigError(
                f"{matrix.name}: outputs of one rank of {n_ranks} begin at {starts}, within a block of {step}"
                " that has one scale: take fewer ranks, or --quantization none"
            )
        return mine

    def product(self, tensors: dict[str, torch.Tensor], k: int) -> Launched:
        """See `FilledScheme`."""
        return product(tensors)

    makes_banks = True

    def bank(self, tensors: dict[str, torch.Tensor], k: int) -> moe.CodedMatrices:
        """See `WeightScheme`. What is multiplied by e4m3 is rounded, see `moe.CodedMatrices.rounds_inputs`."""
        group = BLOCK if self.blocks else 0
        return moe.CodedMatrices(moe.Codes.BYTES, k, tensors["weight"], tensors["scale"], group)

    def put(self, product: Product, first_row: int, coded: Coded) -> None:
        """See `FilledScheme`. Of several scales of what is multiplied the largest holds."""
        found, rows = product.tensors, slice(first_row, first_row + coded.n)
        if self.dtype is E4M3 and bool((coded.codes.view(torch.uint8) & 0x7F == 0x7F).any()):
            raise ValueError("a weight is NaN")
        found["weight"][rows].copy_(coded.codes)
        scales = coded.scales.float()
        if self.blocks:
            found["scale"][first_row // BLOCK : -(-rows.stop // BLOCK)].copy_(scales[::BLOCK])
        else:
            found["scale"][rows].copy_(scales[:, 0])
        if self.static:
            assert coded.input_scale is not None
            found["input_scale"].clamp_(min=float(coded.input_scale))


@dataclasses.dataclass(frozen=True)
class RoundedEightBits(MatrixScheme):
    """A floating matrix, rounded, each output with a scale."""

    codes: torch.dtype
    """int8 or e4m3."""
    keeps_matrix = False

    @property
    def name(self) -> str:
        """Value of --quantization."""
        return EightBits(self.codes).name

    def stored(self, n: int, k: int) -> tuple[Stored, ...]:
        """See `WeightScheme`."""
        return EightBits(self.codes).stored(n, k)

    makes_banks = True

    def bank(self, tensors: dict[str, torch.Tensor], k: int) -> moe.CodedMatrices:
        """See `WeightScheme`."""
        return EightBits(self.codes).bank(tensors, k)

    def finish(self, weight: torch.Tensor) -> Product:
        """See `MatrixScheme`."""
        codes, most = torch.empty_like(weight, dtype=self.codes), MOST[self.codes]
        scales = torch.empty(len(weight), device=weight.device)
        for first in range(0, len(weight), BLOCK):
            rows = slice(first, first + BLOCK)
            wide = weight[rows].float()
            scales[rows] = wide.abs().amax(1).clamp_(min=torch.finfo(torch.float32).tiny * most) / most
            wide /= scales[rows, None]
            codes[rows] = (wide if self.codes is E4M3 else wide.round_()).clamp_(-most, most).to(self.codes)
        if not bool(scales.isfinite().all()):
            raise ValueError("it holds an infinity or a NaN")
        return product({"weight": codes, "scale": scales})


def product(tensors: dict[str, torch.Tensor]) -> Launched:
    """By the op of their type."""
    weight, scale, input_scale = tensors["weight"], tensors["scale"], tensors.get("input_scale")

    def fp8(x: torch.Tensor, bias: torch.Tensor | None, **around: object) -> torch.Tensor:
        return w8a8.linear_fp8(x, weight, scale, bias, x_scale=input_scale, **around)  # type: ignore[arg-type]

    def int8(x: torch.Tensor, bias: torch.Tensor | None, **around: object) -> torch.Tensor:
        return w8a8.linear_int8(x, weight, scale, bias, **around)  # type: ignore[arg-type]

    if weight.dtype is not E4M3:
        return Launched(tensors, int8)
    return Launched(tensors, fp8, w8a8.ahead(scale, input_scale))


def holder(matrix: Matrix, sources: Sequence[Source], device: torch.device, dtype: torch.dtype) -> EightBits | None:
    """What holds a coded matrix as it is; None: nothing does here."""
    coding = sources[0].coding
    if any(source.coding != coding for source in sources) or coding.layout is not Layout.SCALED:
        return None
    if not coding.rounds_inputs or not coding.symmetric:
        return None
    if not coding.is_float:
        return None if coding.group or coding.static_inputs else EightBits(torch.int8)
    if device.type == "cuda" and not converts_to_e4m3(device):
        return None
    if not coding.group:
        return EightBits(E4M3, static=coding.static_inputs and not matrix.bank)
    rows = [n_rows for _, n_rows in matrix.parts]
    in_blocks = len(sources) == 1 or all(n_rows % BLOCK == 0 for n_rows in rows[:-1])
    if (coding.block_rows, coding.group) != (BLOCK, BLOCK) or not in_blocks or not all(map(_keeps_blocks, sources)):
        return None
    return EightBits(E4M3, blocks=True)


def _keeps_blocks(source: Source) -> bool:
    """Whether the order of outputs moves none to another block."""
    order = source.order
    return order is None or torch.equal(order // BLOCK, torch.arange(len(order)) // BLOCK)
