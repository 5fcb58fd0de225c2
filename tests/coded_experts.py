"""Experts in codes, on any device: a random matrix of each, about as large as a trained one's."""

from __future__ import annotations

import dataclasses
import math

import torch

from quire.config.experts import Gating
from quire.kernels import mxfp4, w4a16
from quire.kernels.moe import CodedMatrices, Codes, Matrices, reference


@dataclasses.dataclass(frozen=True)
class Coding:
    """How matrices are kept."""

    kind: Codes
    group: int = 0
    zeros: bool = False
    dtype: torch.dtype = torch.int8

    def matrices(self, n_experts: int, n: int, k: int, dtype: torch.dtype, device: str = "cpu") -> CodedMatrices:
        """[E, n, k] for activations of `dtype`."""
        size = k**-0.5
        if self.kind is Codes.BYTES:
            codes = torch.randn(n_experts, n, k, device=device).mul_(40).clamp_(-127, 127).to(self.dtype)
            lines = (-(-n // 128), -(-k // 128)) if self.group else (n,)
            scales = torch.rand(n_experts, *lines, device=device).add_(0.5).mul_(size / 40)
            return CodedMatrices(self.kind, k, codes, scales, self.group)
        each = [self._words(n, k, size, dtype, device) for _ in range(n_experts)]
        codes, scales = torch.stack([one[0] for one in each]), torch.stack([one[1] for one in each])
        factors = None
        if self.group == mxfp4.NV_BLOCK:
            factors = torch.rand(n_experts, n, device=device).add_(0.5).mul_(size / 300)
        return CodedMatrices(self.kind, k, codes, scales, self.group, self.zeros, factors)

    def _words(self, n: int, k: int, size: float, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, torch.Tensor]:
        if self.kind is Codes.FP4:
            blocks = torch.randint(0, 256, (n, k // 2), device=device, dtype=torch.uint8)
            if self.group == mxfp4.NV_BLOCK:
                scales = torch.randint(0, 127, (n, -(-k // 16)), device=device, dtype=torch.uint8)
                made = mxfp4.pack(blocks, scales, torch.ones(n, device=device))
                return made.codes, made.scales.T
            middle = 127 + round(math.log2(size / 3))
            shape = (n, -(-k // 32))
            exponents = torch.randint(middle - 1, middle + 2, shape, device=device, dtype=torch.uint8)
            made = mxfp4.pack(blocks, exponents)
            return made.codes, made.scales.T
        group = self.group or k
        codes = torch.randint(0, 16, (n, k), device=device, dtype=torch.uint8)
        scales = torch.rand(n, -(-k // group), device=device).add_(0.5).mul_(size / 5).to(dtype)
        points = torch.randint(0, 17, scales.shape, device=device, dtype=torch.uint8) if self.zeros else None
        weight = w4a16.pack(codes, scales, points, group=group)
        return weight.codes, weight.scales.T


CODINGS = (
    Coding(Codes.BYTES),
    Coding(Codes.BYTES, dtype=torch.float8_e4m3fn),
    Coding(Codes.BYTES, group=128, dtype=torch.float8_e4m3fn),
    Coding(Codes.INT4, group=32, zeros=True),
    Coding(Codes.INT4, group=128),
    Coding(Codes.INT4),
    Coding(Codes.FP4, group=32),
    Coding(Codes.FP4, group=16),
)


def wide(matrices: Matrices) -> torch.Tensor:
    """[E, n, k] float64."""
    return torch.stack([matrices[expert].double() for expert in range(matrices.shape[0])])


def expected(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    up: Matrices,
    down: Matrices,
    gating: Gating,
    *biases: torch.Tensor | None,
) -> torch.Tensor:
    """[n, hidden] float64: what kernels are compared with. Where rows are rounded to e4m3 they are rounded from x's
    dtype, also between the products."""
    parts = [up, down]
    if not (isinstance(up, CodedMatrices) and up.rounds_inputs):
        x, parts = x.double(), [wide(up), wide(down)]
    target = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    added = [None if one is None else one.double() for one in biases]
    return reference.experts(x, ids, weights, *parts, gating, *added, residual=target)


def error(got: torch.Tensor, sums: torch.Tensor, residual: torch.Tensor | None = None) -> float:
    """Largest |got - wanted| / (1 + the larger of |sums| and |wanted|); wanted: the sums, plus a residual if there was.

    sums: [n, hidden] of experts alone, in a wide dtype. Their rounding errors are as large as they are: where a
    residual cancels a sum, what is left is small, and its error is not.
    """
    wanted = sums if residual is None else sums + residual.to(sums.dtype)
    return float(((got.to(sums.dtype) - wanted).abs() / (1 + torch.maximum(sums.abs(), wanted.abs()))).max())


def check(
    got: torch.Tensor,
    sums: torch.Tensor,
    coding: Coding | None,
    what: object = "",
    residual: torch.Tensor | None = None,
) -> None:
    """What kernels gave, against `expected`. residual: as it was before they added to it."""
    found = error(got, sums, residual)
    if coding is not None and coding.dtype.is_floating_point:
        wanted = sums if residual is None else sums + residual.double()
        assert found <= reference.ROUNDED_TOLERANCE, (found, what)
        share = float((got.double() - wanted).norm() / sums.norm().clamp(min=1e-9))
        assert share <= reference.ROUNDED_NORM, (share, what)
    else:
        allowed = reference.TOLERANCE[got.dtype] * max(1.0, float(sums.std()))  # zero points make large sums
        assert found <= allowed, (found, what)
