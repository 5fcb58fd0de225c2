"""Linear layers in e4m3 by the CUDA C++ kernels of `kernels/gemm`, built for codes of a byte (csrc/cuda/gemm.h).

Owns which of them runs and its arguments. Does not own the kernels, their tiling (`gemm/plan.py`, `gemm/wide.py`) nor
the rounding of x (`triton`). Invariants: a chunk of 128 bytes takes as long whatever its codes are, so a product of k
bytes is planned as one of k / 2 elements; shapes alone decide.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from collections.abc import Callable

import torch

from quire.kernels import around, jit
from quire.kernels.gemm.estimate import MIN_WIDE_ROWS, estimate_alone_us, estimate_us
from quire.kernels.gemm.hopper import (
    ALIGNMENT_BYTES,
    DTYPES,
    MAX_ROWS,
    Args,
    Build,
    WideArgs,
    function_of,
    n_processors_of,
)
from quire.kernels.gemm.plan import MAX_FEW_ROWS, N_AHEAD, Plan, ProductShape, plan
from quire.kernels.gemm.wide import WidePlan, wide_plan
from quire.kernels.hopper import machine_obstacle
from quire.kernels.invariance import are_rows_alone
from quire.kernels.norm import rms_norm
from quire.kernels.w8a8.reference import BLOCK
from quire.kernels.w8a8.triton import Rounded, round_rows

MAX_TOKENS = 192
"""Of a tile: a thread has its sums twice, those of the chunk and those of all before."""


@dataclasses.dataclass(frozen=True, slots=True)
class Launch:
    """A compiled kernel and how to cut its product."""

    function: Callable[..., int]
    product: ProductShape
    plan: Plan | WidePlan

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
        blocks, m, n = weight_scale.dim() == 2, x.shape[0], weight.shape[0]
        room = self.plan.tokens if isinstance(self.plan, WidePlan) else self.product.tokens
        rounded = round_rows(x, weight.dtype, blocks, x_scale, room=room)
        y = out if residual is None else residual
        if y is None:
            y = torch.empty(m, n // 2 if silu_mul else n, dtype=x.dtype, device=x.device)
        steps = (rounded.scales.shape[-1] if blocks else int(x_scale is None), int(weight_scale.numel() > 1))
        if isinstance(self.plan, WidePlan):
            sums = torch.empty(self.plan.sums_size, dtype=torch.float32, device=x.device)
            args: ctypes.Structure = _wide_arguments(self.plan, rounded, weight, weight_scale, bias, y, sums, steps)
        else:
            args = _arguments(self.plan, rounded, weight, weight_scale, bias, residual, y, steps)
        code = self.function(ctypes.byref(args), torch.cuda.current_stream(x.device).cuda_stream)
        if code:
            raise RuntimeError(
                f"w8a8 {tuple(x.shape)} x {tuple(weight.shape)} could not be launched: CUDA error {code}"
            )
        return y


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
    if (y.data_ptr() | y.stride(0) * y.element_size()) % ALIGNMENT_BYTES:
        return f"rows of the result do not start at multiples of {ALIGNMENT_BYTES} bytes"
    return found


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
    found = static_obstacle(n, k, dtype, silu) or machine_obstacle()
    if found:
        return found
    product = ProductShape(m, n, k // 2, silu=silu)
    made = plan_of(product, n_processors_of(device), alone)
    try:
        return Launch(function_of(product, made, Build(dtype, residual, bias, wide, kind)), product, made)
    except jit.BuildError as error:
        return str(error)


def plan_of(product: ProductShape, n_processors: int, alone: bool) -> Plan | WidePlan:
    """The faster one by its estimate. alone: of those that do not split K, which sum in one order."""
    found: list[Plan | WidePlan] = []
    if product.m <= MAX_FEW_ROWS and (few := plan(product, n_processors, alone=alone)) is not None:
        found.append(few)
    if product.m >= MIN_WIDE_ROWS or not found:
        found.append(wide_plan(product, n_processors, alone=alone, max_tokens=MAX_TOKENS))
    estimate = estimate_alone_us if alone else estimate_us
    return min(found, key=lambda one: estimate(product, one, n_processors))


def _arguments(
    plan: Plan,
    x: Rounded,
    w: torch.Tensor,
    w_scale: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    y: torch.Tensor,
    steps: tuple[int, int],
) -> Args:
    m, (n, k) = len(x.codes), w.shape
    return Args(
        x.codes.data_ptr(), w.data_ptr(), None, None if bias is None else bias.data_ptr(),
        None if residual is None else residual.data_ptr(), y.data_ptr(), x.scales.data_ptr(), w_scale.data_ptr(),
        x.codes.stride(0), 0 if residual is None else residual.stride(0), y.stride(0),
        m, n, k, plan.n_clusters, plan.n_stages, N_AHEAD, 1, (m - 1).bit_length(), *steps, 0, 0.0,
    )  # fmt: skip


def _wide_arguments(
    plan: WidePlan,
    x: Rounded,
    w: torch.Tensor,
    w_scale: torch.Tensor,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    sums: torch.Tensor,
    steps: tuple[int, int],
) -> WideArgs:
    return WideArgs(
        x.codes.data_ptr(), w.data_ptr(), None if bias is None else bias.data_ptr(), y.data_ptr(), sums.data_ptr(),
        x.scales.data_ptr(), w_scale.data_ptr(), x.codes.stride(0), y.stride(0),
        len(x.codes), *w.shape, *steps, 0, plan.n_teams, plan.n_together,
    )  # fmt: skip


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
