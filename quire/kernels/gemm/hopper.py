"""Linear layers in CUDA C++ for Hopper (csrc/cuda/gemm.cu, gemm_wide.cu), built by the JIT once for each variant.

Owns which build runs, and what stands before it. Does not own the kernels, how they are called (hopper_product.py),
their tiling (plan.py, wide.py) nor which is best (estimate.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from quire.kernels.around import Norm
from quire.kernels.gemm.estimate import fastest
from quire.kernels.gemm.hopper_product import (
    ALIGNMENT_BYTES,
    DTYPES,
    MAX_ROWS,
    ROW_STEP,
    Build,
    CompiledProduct,
    function_of,
    lies_wrong,
    n_processors_of,
)
from quire.kernels.gemm.plan import CHUNK, MAX_NORM_ROWS, Plan, ProductShape
from quire.kernels.gemm.wide import WidePlan
from quire.kernels.hopper import built
from quire.kernels.invariance import are_rows_alone
from quire.kernels.norm import rms_norm
from quire.kernels.processors import n_left


class Launch(CompiledProduct):
    """Of w as it is multiplied."""

    __slots__ = ()

    def __call__(
        self,
        x: torch.Tensor,
        w: torch.Tensor,
        bias: torch.Tensor | None,
        norm: Norm | None,
        residual: torch.Tensor | None,
        silu_mul: bool,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        """See op.py; for the arguments that it was prepared for."""
        return self.start(x, w, w.shape, x.dtype, bias, norm, residual, silu_mul, out)


def prepare(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    norm: Norm | None,
    residual: torch.Tensor | None,
    silu_mul: bool,
    out: torch.Tensor | None,
    *,
    apart: bool = True,
) -> Callable[..., torch.Tensor] | str:
    """`linear` ready for these arguments, or why it is not for these kernels. Compiles what is new (seconds).

    apart: a norm that cannot be fused may be a launch of its own.
    """
    m, row = x.shape[0], x.stride(0)
    if not 1 <= m <= MAX_ROWS:
        return f"{m} rows are not within 1..{MAX_ROWS}"
    if not x.is_cuda:
        return f"tensors are on {x.device}"
    if w.data_ptr() % ALIGNMENT_BYTES:
        return f"the address of w is not a multiple of {ALIGNMENT_BYTES} bytes"
    if x.data_ptr() % ALIGNMENT_BYTES:
        found: Launch | str = f"the address of x is not a multiple of {ALIGNMENT_BYTES} bytes"
    elif row % ROW_STEP and m > 1:
        found = f"rows of x are {row} elements apart, not a multiple of {ALIGNMENT_BYTES} bytes"
    elif norm is not None and norm[0].data_ptr() % ALIGNMENT_BYTES:
        found = f"the address of norm is not a multiple of {ALIGNMENT_BYTES} bytes"
    elif norm is not None and m > MAX_NORM_ROWS:
        found = f"a norm is fused for at most {MAX_NORM_ROWS} rows, here are {m}"
    else:
        found = _launch(x, w, bias, norm is not None, residual, silu_mul, out)
    if norm is None or not apart or isinstance(found, Launch):
        return found
    # The product alone may still be for a kernel: the norm's result lies as a kernel wants it.
    alone = _launch(x, w, bias, False, residual, silu_mul, out)
    return alone if isinstance(alone, str) else functools.partial(_after_norm, alone)


def _launch(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    norm: bool,
    residual: torch.Tensor | None,
    silu_mul: bool,
    out: torch.Tensor | None,
) -> Launch | str:
    """What only shapes, types and the place of the result decide."""
    fused = (norm, silu_mul, residual is not None, bias is not None, out is not None and out.dtype != x.dtype)
    found = _prepared(x.shape[0], *w.shape, x.dtype, x.device, *fused, are_rows_alone(), n_left())
    y = out if residual is None else residual
    if y is None or isinstance(found, str) or not isinstance(found.plan, WidePlan):
        return found
    return lies_wrong(y) or found


def _after_norm(
    launch: Launch,
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    norm: Norm | None,
    residual: torch.Tensor | None,
    silu_mul: bool,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """A norm by its own kernel, then the product."""
    return launch(x if norm is None else rms_norm(x, *norm), w, bias, None, residual, silu_mul, out)


def static_obstacle(product: ProductShape, dtype: torch.dtype) -> str | None:
    """Why no machine could run this with this kernel, or None."""
    if dtype not in DTYPES:
        return f"x is {dtype}: it must be bfloat16 or float16"
    step = 16 if product.silu else 8
    if product.k % CHUNK or product.n % step:
        return f"w is [{product.n}, {product.k}]: its sizes must be multiples of {step} and {CHUNK}"
    return None


@functools.cache
def _prepared(
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    device: torch.device,
    norm: bool,
    silu: bool,
    residual: bool,
    bias: bool,
    wide: bool,
    alone: bool,
    left: int,
) -> Launch | str:
    product, build = ProductShape(m, n, k, norm, silu), Build(dtype, residual, bias, wide)
    found = static_obstacle(product, build.dtype)
    if found:
        return found

    def make() -> Launch | str:
        plan = fastest(product, n_processors_of(device), alone, left)
        return plan if isinstance(plan, str) else load(product, plan, build)

    return built(make)


def load(product: ProductShape, plan: Plan | WidePlan, build: Build) -> Launch:
    """The kernel of a plan, compiled if it is new. Raises BuildError."""
    return Launch(function_of(product, plan, build), plan)


def linear(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    norm: Norm | None,
    residual: torch.Tensor | None,
    silu_mul: bool,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """See op.py, in one launch. Raises ValueError where there is none."""
    launch = prepare(x, w, bias, norm, residual, silu_mul, out, apart=False)
    if isinstance(launch, str):
        raise ValueError(f"this product is not for the Hopper kernel: {launch}")
    return launch(x, w, bias, norm, residual, silu_mul, out)
