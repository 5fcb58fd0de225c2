"""Cases of linear layers with weights of 8 and 4 bits, on any device: random ones, and how far a result is off."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

from quire.kernels import mxfp4, w4a16
from quire.kernels.around import Norm


@dataclasses.dataclass(frozen=True)
class Around:
    """What stands around a product."""

    bias: torch.Tensor | None
    norm: Norm | None
    residual: torch.Tensor | None
    silu_mul: bool
    out: torch.Tensor | None

    @property
    def arguments(self) -> tuple[object, ...]:
        return self.bias, self.norm, self.residual, self.silu_mul, self.out

    def own(self) -> Around:
        """With a residual or an `out` of its own."""
        residual = None if self.residual is None else self.residual.clone()
        return dataclasses.replace(self, residual=residual, out=None if self.out is None else self.out.clone())


def arounds(m: int, n: int, k: int, like: torch.Tensor) -> Iterator[Around]:
    """Nothing, a bias, and each of the others."""
    yield Around(None, None, None, False, None)
    bias = like.new_empty(n).normal_()
    yield Around(bias, None, like.new_empty(m, n).normal_(), False, None)
    norm = (like.new_empty(k).normal_(), 1e-5)
    yield Around(None, norm, None, False, torch.full((m, n), torch.nan, dtype=torch.float32, device=like.device))
    if n % 2 == 0:
        yield Around(bias, None, None, True, None)


def rows(m: int, k: int, dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    """x, whose rows are not side by side, each of another size from 1 down to 1 / 16; with four or more one is zero."""
    sizes = torch.logspace(0, -4, m, base=2, device=device)[:, None]
    x = torch.randn(m, k + 8, device=device).mul_(sizes).to(dtype)[:, :k]
    if m >= 4:
        x[m // 2] = 0
    return x


def fp8(n: int, k: int, blocks: str, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix in e4m3 and its scales: of the 'tensor', its 'channel's or 'blocks'."""
    weight = torch.randn(n, k, device=device).mul_(60).to(torch.float8_e4m3fn)
    shape = {"tensor": (1,), "channel": (n,), "blocks": (-(-n // 128), -(-k // 128))}[blocks]
    return weight, torch.rand(shape, device=device).add_(0.5).mul_(k**-0.5 / 60)


def int8(n: int, k: int, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix of integers and the scales of its rows."""
    weight = torch.randint(-127, 128, (n, k), device=device, dtype=torch.int8)
    return weight, torch.rand(n, device=device).add_(0.5).mul_(k**-0.5 / 60)


def int4(
    n: int, k: int, group: int, dtype: torch.dtype, *, zeros: bool, order: bool, device: str = "cpu"
) -> w4a16.Int4Weight:
    """A matrix of 4-bit integers."""
    n_groups = -(-k // group)
    codes = torch.randint(0, 16, (n, k), device=device, dtype=torch.uint8)
    scales = torch.rand(n, n_groups, device=device).add_(0.5).mul_(k**-0.5 / 5).to(dtype)
    points = torch.randint(0, 17, (n, n_groups), device=device, dtype=torch.uint8) if zeros else None
    return w4a16.pack(codes, scales, points, group=group, order=torch.randperm(k, device=device) if order else None)


def fp4(n: int, k: int, device: str = "cpu") -> mxfp4.Fp4Weight:
    """A matrix in MXFP4."""
    blocks = torch.randint(0, 256, (n, k // 2), device=device, dtype=torch.uint8)
    return mxfp4.pack(blocks, torch.randint(119, 124, (n, -(-k // 32)), device=device, dtype=torch.uint8))


def nvfp4(n: int, k: int, device: str = "cpu") -> mxfp4.Fp4Weight:
    """A matrix in NVFP4: scales of any size that e4m3 has, the subnormal ones and the largest too."""
    blocks = torch.randint(0, 256, (n, k // 2), device=device, dtype=torch.uint8)
    scales = torch.randint(0, 127, (n, -(-k // 16)), device=device, dtype=torch.uint8)
    factors = torch.rand(n, device=device).add_(0.5).mul_(k**-0.5 / 300)
    return mxfp4.pack(blocks, scales, factors)


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest |got - expected| / (size + |expected|); size: the root of the mean square of the row that is expected, so
    that small rows count as much as large ones."""
    wanted = expected.double()
    sizes = wanted.square().mean(1, keepdim=True).sqrt().clamp(min=1e-30)
    return float(((got.double() - wanted).abs() / (sizes + wanted.abs())).nan_to_num(torch.inf).max())
