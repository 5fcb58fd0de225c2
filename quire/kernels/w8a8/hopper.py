"""Linear layers in e4m3 by the CUDA C++ kernels of `kernels/gemm`, built for codes of a byte (csrc/cuda/gemm.h).

Owns which build runs. Does not own the kernels, how they are called (`gemm/hopper_product.py`), which is best
(`plan`) nor the rounding of x by a launch (`rounding`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from quire.kernels import around
from quire.kernels.gemm.hopper_product import (
    ALIGNMENT_BYTES,
    MAX_ROWS,
    Build,
    CompiledProduct,
    function_of,
    lies_wrong,
    n_processors_of,
)
from quire.kernels.gemm.wide import WidePlan
from quire.kernels.hopper import built
from quire.kernels.invariance import are_rows_alone
from quire.kernels.w8a8.builds import static_obstacle
from quire.kernels.w8a8.plan import CodedPlan, coded_plan
from quire.kernels.w8a8.rounding import round_rows
from quire.kernels.w8a8.triton import Rounded


class Launch(CompiledProduct):
    """Of codes of a byte: the norm and rounding of x are one launch before it, or are done by the product itself."""

    __slots__ = ("rounds", "tokens")

    def __init__(self, function: Callable[..., int], made: CodedPlan) -> None:
        super().__init__(function, made.plan)
        self.rounds = made.cells > 0
        """The product norms and rounds x itself."""
        self.tokens = made.plan.tokens if isinstance(made.plan, WidePlan) else made.product.tokens
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
        blocks, w_step = weight_scale.dim() == 2, int(weight_scale.numel() > 1)
        if self.rounds:
            return self.start(
                x, weight, weight.shape, x.dtype, bias, norm, residual, silu_mul, out, None, weight_scale, (0, w_step)
            )
        rounded = round_rows(x, blocks, x_scale, room=self.tokens, norm=norm)
        return self.multiply(rounded, weight, weight_scale, x.dtype, bias, residual, silu_mul, out)

    def multiply(
        self,
        x: Rounded,
        weight: torch.Tensor,
        weight_scale: torch.Tensor,
        dtype: torch.dtype,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        silu_mul: bool = False,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The product alone, of rows that have room for `tokens`. dtype: of the result."""
        per_row = x.scales.shape[-1] if weight_scale.dim() == 2 else int(x.scales.numel() > 1)
        return self.start(
            x.codes, weight, weight.shape, dtype, bias, None, residual, silu_mul, out, x.scales, weight_scale,
            (per_row, int(weight_scale.numel() > 1)),
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
    around_x = norm is not None, x_scale is None and _lies_well(x, norm)
    found = _prepared(m, *weight.shape, x.dtype, x.device, kind, *fused, *around_x, are_rows_alone())
    y = out if residual is None else residual
    if y is None or isinstance(found, str) or not isinstance(found.plan, WidePlan):
        return found
    return lies_wrong(y) or found


def _lies_well(x: torch.Tensor, norm: around.Norm | None) -> bool:
    """Whether threads can read cells of 16 bytes of x and of what norms it."""
    places = x.data_ptr() | (0 if norm is None else norm[0].data_ptr())
    return places % ALIGNMENT_BYTES == 0 and (norm is None or norm[0].stride(0) == 1)


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
    norm: bool,
    rounds: bool,
    alone: bool,
) -> Launch | str:
    found = static_obstacle(n, k, dtype, silu)
    if found:
        return found
    made = coded_plan(
        m, n, k, silu, norm, n_processors_of(device), alone=alone, rounds=rounds and kind == 1, blocks=kind == 2
    )
    build = Build(dtype, residual, bias, wide, kind)
    return built(lambda: Launch(function_of(made.product, made.plan, build, made.codes), made))


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
