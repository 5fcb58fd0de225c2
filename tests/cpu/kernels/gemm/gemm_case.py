"""Random linear layers with their float64 result, for the CPU and the GPU."""

from __future__ import annotations

import dataclasses

import torch

from quire.kernels import gemm
from quire.kernels.gemm import hopper, reference

EPS = 1e-5


@dataclasses.dataclass(frozen=True)
class Case:
    m: int
    n: int
    k: int
    norm: bool = False
    residual: bool = False
    silu_mul: bool = False
    bias: bool = False
    wide: bool = False


@dataclasses.dataclass
class Inputs:
    """Arguments of one case: x and the residual are parts of wider tensors, what lies behind their rows is NaN."""

    x: torch.Tensor
    w: torch.Tensor
    bias: torch.Tensor | None
    norm: tuple[torch.Tensor, float] | None
    residual: torch.Tensor | None
    out: torch.Tensor | None
    silu_mul: bool

    @classmethod
    def make(cls, case: Case, dtype: torch.dtype, device: str) -> Inputs:
        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device=device).to(dtype)

        def part(rows: int, columns: int) -> torch.Tensor:
            whole = torch.full((rows + 2, columns + 64), torch.nan, dtype=dtype, device=device)
            whole[:rows, :columns] = randn(rows, columns)
            return whole[:rows, :columns]

        width = case.n // 2 if case.silu_mul else case.n
        return cls(
            part(case.m, case.k),
            (randn(case.n, case.k).float() * case.k**-0.5).to(dtype),
            randn(case.n) if case.bias else None,
            (randn(case.k), EPS) if case.norm else None,
            part(case.m, width) if case.residual else None,
            torch.full((case.m, width), torch.nan, device=device) if case.wide else None,
            case.silu_mul,
        )

    def run(self) -> torch.Tensor:
        """The result; the residual stays as it was."""
        residual = None if self.residual is None else self.residual.clone()
        return gemm.linear(
            self.x, self.w, self.bias, norm=self.norm, residual=residual, silu_mul=self.silu_mul, out=self.out
        )

    def build(self) -> hopper.Build:
        wide = self.out is not None and self.out.dtype != self.x.dtype
        return hopper.Build(self.x.dtype, self.residual is not None, self.bias is not None, wide)

    def run_with(self, launch: hopper.Launch) -> torch.Tensor:
        """The result of one kernel; the residual stays as it was."""
        residual = None if self.residual is None else self.residual.clone()
        return launch(self.x, self.w, self.bias, self.norm, residual, self.silu_mul, self.out)

    def obstacle(self) -> str | None:
        return gemm.obstacle(
            self.x, self.w, self.bias, norm=self.norm, residual=self.residual, silu_mul=self.silu_mul, out=self.out
        )

    def expected(self) -> torch.Tensor:
        """In float64."""
        bias, residual = (None if tensor is None else tensor.double() for tensor in (self.bias, self.residual))
        norm = None if self.norm is None else (self.norm[0].double(), self.norm[1])
        return reference.linear(self.x.double(), self.w.double(), bias, norm, residual, self.silu_mul)


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((got.double() - expected).abs() / (1 + expected.abs())).max())
