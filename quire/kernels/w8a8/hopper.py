"""Linear layers in e4m3 by the CUDA C++ kernels of `kernels/gemm`, built for codes of a byte (csrc/cuda/gemm.h).

Owns which of them runs. Does not own the kernels, how they are called (`gemm/hopper_product.py`), their tiling
(`gemm/plan.py`, `gemm/wide.py`) nor the rounding of x (`rounding`). Invariants: a chunk of 128 bytes takes as long
whatever its codes are, so a product of k bytes is planned as one of k / 2 elements; shapes alone decide.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from quire.kernels import around
from quire.kernels.gemm.estimate import MIN_WIDE_ROWS, estimate_alone_us, estimate_us
from quire.kernels.gemm.hopper_product import (
    ALIGNMENT_BYTES,
    DTYPES,
    MAX_ROWS,
    Build,
    CompiledProduct,
    function_of,
    lies_wrong,
    n_processors_of,
)
from quire.kernels.gemm.plan import MAX_FEW_ROWS, Plan, ProductShape, plan
from quire.kernels.gemm.wide import WidePlan, wide_plan
from quire.kernels.hopper import built
from quire.kernels.invariance import are_rows_alone
from quire.kernels.norm import rms_norm
from quire.kernels.w8a8.reference import BLOCK
from quire.kernels.w8a8.rounding import round_rows

MAX_TOKENS = 192
"""Of a tile: a thread has its sums twice, those of the chunk and those of all before."""


class Launch(CompiledProduct):
    """Of codes of a byte: the rounding of x comes first."""

    __slots__ = ("tokens",)

    def __init__(self, function: Callable[..., int], product: ProductShape, plan: Plan | WidePlan) -> None:
        super().__init__(function, plan)
        self.tokens = plan.tokens if isinstance(plan, WidePlan) else product.tokens
        """Of a tile."""

    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        weight_scale: torch.Tensor,
        x_scale: torch.Tensor | None,
        bias: torch.Tensor | None,
        norm: around.Norm | None,
        residual: torch.Tensor | None,
        silu_mul: bool,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        """See op.py; for the arguments that it was prepared for."""
        if norm is not None:
            x = rms_norm(x, *norm)
        blocks = weight_scale.dim() == 2
        rounded = round_rows(x, blocks, x_scale, room=self.tokens)
        steps = (rounded.scales.shape[-1] if blocks else int(x_scale is None), int(weight_scale.numel() > 1))
        return self.start(
            rounded.codes, weight, weight.shape, x.dtype, bias, None, residual, silu_mul, out, rounded.scales,
            weight_scale, steps,
        )  # fmt: skip


def prepare(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    x_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    norm: around.Norm | None,
    residual: torch.Tensor | None,
    silu_mul: bool,
    out: torch.Tensor | None,
) -> Launch | str:
    """`linear_fp8` ready for these arguments, or why it is not for these kernels. Compiles what is new (seconds)."""
    m = x.shape[0]
    if weight.dtype is not torch.float8_e4m3fn:
        return f"weights are {weight.dtype}"
    if not 1 <= m <= MAX_ROWS:
        return f"{m} rows are not within 1..{MAX_ROWS}"
    if not x.is_cuda:
        return f"tensors are on {x.device}"
    if weight.data_ptr() % ALIGNMENT_BYTES:
        return f"the address of the weights is not a multiple of {ALIGNMENT_BYTES} bytes"
    fused = (silu_mul, residual is not None, bias is not None, out is not None and out.dtype != x.dtype)
    kind = 2 if weight_scale.dim() == 2 else 1
    found = _prepared(m, *weight.shape, x.dtype, x.device, kind, *fused, are_rows_alone())
    y = out if residual is None else residual
    if y is None or isinstance(found, str) or not isinstance(found.plan, WidePlan):
        return found
    return lies_wrong(y) or found


def static_obstacle(n: int, k: int, dtype: torch.dtype, silu_mul: bool) -> str | None:
    """Why no machine could run this with these kernels, or None."""
    if dtype not in DTYPES:
        return f"x is {dtype}: it must be bfloat16 or float16"
    step = 16 if silu_mul else 8
    if k % BLOCK or n % step:
        return f"weights are [{n}, {k}]: the sizes must be multiples of {step} and {BLOCK}"
    return None


@functools.cache
def _prepared(
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    device: torch.device,
    kind: int,
    silu: bool,
    residual: bool,
    bias: bool,
    wide: bool,
    alone: bool,
) -> Launch | str:
    found = static_obstacle(n, k, dtype, silu)
    if found:
        return found
    product = ProductShape(m, n, k // 2, silu=silu)

    def make() -> Launch:
        plan = plan_of(product, n_processors_of(device), alone)
        return Launch(function_of(product, plan, Build(dtype, residual, bias, wide, kind)), product, plan)

    return built(make)


def plan_of(product: ProductShape, n_processors: int, alone: bool) -> Plan | WidePlan:
    """The faster one by its estimate. alone: of those that do not split K, which sum in one order."""
    found: list[Plan | WidePlan] = []
    if product.m <= MAX_FEW_ROWS and (few := plan(product, n_processors, alone=alone)) is not None:
        found.append(few)
    if product.m >= MIN_WIDE_ROWS or not found:
        found.append(wide_plan(product, n_processors, alone=alone, max_tokens=MAX_TOKENS))
    estimate = estimate_alone_us if alone else estimate_us
    return min(found, key=lambda one: estimate(product, one, n_processors))


def linear_fp8(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    x_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    norm: around.Norm | None,
    residual: torch.Tensor | None,
    silu_mul: bool,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """See op.py. Raises ValueError where there is no kernel."""
    launch = prepare(x, weight, weight_scale, x_scale, bias, norm, residual, silu_mul, out)
    if isinstance(launch, str):
        raise ValueError(f"this product is not for the Hopper kernel: {launch}")
    return launch(x, weight, weight_scale, x_scale, bias, norm, residual, silu_mul, out)
