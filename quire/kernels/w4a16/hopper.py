"""Linear layers of 4 bits by the CUDA C++ kernels of `kernels/gemm`, built for codes (csrc/cuda/gemm.h).

Owns which build runs. Does not own the kernels, how they are called (`gemm/hopper_product.py`) nor their tiling
(`plan.py`, `gemm/wide.py`). Invariant: where rows are alone one kernel, that of many rows, multiplies any number of
them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator

import torch

from quire.kernels import around
from quire.kernels.gemm.ahead import Coded, LinearShape
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
    variant_of,
)
from quire.kernels.gemm.plan import Plan, ProductShape
from quire.kernels.gemm.wide import WidePlan
from quire.kernels.hopper import built
from quire.kernels.invariance import are_rows_alone
from quire.kernels.norm import rms_norm
from quire.kernels.w4a16.plan import CHUNK, MAX_FEW_ROWS, WIDE_CHUNK, Int4Shape, plan, wide_plan
from quire.kernels.w4a16.weight import Int4Weight

GROUPS = (32, 64, 128)
"""Groups of columns that are less than a chunk."""


class Launch(CompiledProduct):
    """Of codes of 4 bits."""

    __slots__ = ()

    def __call__(
        self,
        x: torch.Tensor,
        weight: Int4Weight,
        bias: torch.Tensor | None,
        norm: around.Norm | None,
        residual: torch.Tensor | None,
        silu_mul: bool,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        """See op.py; for the arguments that it was prepared for."""
        if norm is not None:
            x = rms_norm(x, *norm)
        if weight.order is not None:
            x = x.index_select(1, weight.order)
        elif x.data_ptr() % ALIGNMENT_BYTES or x.stride(0) % ROW_STEP:
            x = x.clone(memory_format=torch.contiguous_format)
        return self.start(
            x, weight.codes, (weight.n, weight.k), x.dtype, bias, None, residual, silu_mul, out, None, weight.scales,
            group=weight.group,
        )  # fmt: skip


def prepare(
    x: torch.Tensor,
    weight: Int4Weight,
    bias: torch.Tensor | None,
    norm: around.Norm | None,
    residual: torch.Tensor | None,
    silu_mul: bool,
    out: torch.Tensor | None,
) -> Launch | str:
    """`linear` ready for these arguments, or why it is not for this kernel. Compiles what is new (seconds)."""
    m = len(x)
    if not 1 <= m <= MAX_ROWS:
        return f"{m} rows are not within 1..{MAX_ROWS}"
    if not x.is_cuda:
        return f"tensors are on {x.device}"
    if (weight.codes.data_ptr() | weight.scales.data_ptr()) % ALIGNMENT_BYTES:
        return f"the address of the weights is not a multiple of {ALIGNMENT_BYTES} bytes"
    fused = (silu_mul, residual is not None, bias is not None, out is not None and out.dtype != x.dtype)
    shape = m, weight.n, weight.k, weight.group, weight.has_zeros
    kind = x.dtype, x.device, *fused, are_rows_alone()
    found = _prepared(*shape, *kind)
    y = out if residual is None else residual
    if y is not None and isinstance(found, Launch) and isinstance(found.plan, WidePlan):
        return lies_wrong(y) or found
    return found


def static_obstacle(product: Int4Shape, dtype: torch.dtype, silu_mul: bool) -> str | None:
    """Why no machine could run this with this kernel, or None."""
    if dtype not in DTYPES:
        return f"x is {dtype}: it must be bfloat16 or float16"
    step = 16 if silu_mul else 8
    if product.k % CHUNK or product.n % step:
        return f"weights are [{product.n}, {product.k}]: the sizes must be multiples of {step} and {CHUNK}"
    if product.group not in GROUPS and product.group % CHUNK:
        return f"groups of {product.group} columns must be {', '.join(map(str, GROUPS))}, or multiples of {CHUNK}"
    return None


@functools.cache
def _prepared(
    m: int,
    n: int,
    k: int,
    group: int,
    zeros: bool,
    dtype: torch.dtype,
    device: torch.device,
    silu: bool,
    residual: bool,
    bias: bool,
    wide: bool,
    alone: bool,
) -> Launch | str:
    product = Int4Shape(m, n, k, group, zeros)
    found = static_obstacle(product, dtype, silu)
    if found:
        return found
    made = choose(product, n_processors_of(device), alone=alone)

    def make() -> Launch:
        return load(product, made, dtype, silu, residual, bias, wide)

    return built(make)


def choose(product: Int4Shape, n_processors: int, *, alone: bool) -> Plan | WidePlan:
    """How a product is cut, and by which kernel. That of few rows stores a result anywhere."""
    if product.m <= MAX_FEW_ROWS and not alone:
        return plan(product, n_processors)
    return wide_plan(product, n_processors, alone=alone)


def load(
    product: Int4Shape,
    plan: Plan | WidePlan,
    dtype: torch.dtype,
    silu: bool,
    residual: bool,
    bias: bool,
    wide: bool,
) -> Launch:
    """The kernel of a plan, compiled if it is new. Raises BuildError."""
    return Launch(function_of(*_definition(product, plan, silu, Build(dtype, residual, bias, wide))), plan)


def _definition(
    product: Int4Shape, plan: Plan | WidePlan, silu: bool, build: Build
) -> tuple[ProductShape, Plan | WidePlan, Build, dict[str, int]]:
    """What `function_of` and `variant_of` take."""
    is_wide = isinstance(plan, WidePlan)
    codes = {"NIBBLES": 2 if is_wide else 1, "ZEROS": int(product.zeros)}
    if not isinstance(plan, WidePlan):
        codes["PAIRED"] = int(plan.paired)
    codes["CHUNK_GROUPS"] = product.groups_of(WIDE_CHUNK if is_wide else CHUNK)
    return ProductShape(product.m, product.n, product.k, silu=silu), plan, build, codes


def ahead(weight: Int4Weight) -> Coded:
    """What `linear` compiles for this matrix: see `gemm.build`."""
    return _ahead(Int4Shape(1, weight.n, weight.k, weight.group, weight.has_zeros))


@functools.cache
def _ahead(one_row: Int4Shape) -> Coded:
    return functools.partial(_variants, one_row)


def _variants(
    one_row: Int4Shape, layer: LinearShape, dtype: torch.dtype, rows: Iterable[int], n_processors: int, alone: bool
) -> Iterator[tuple[str, tuple[str, ...]]]:
    build = Build(dtype, layer.residual, layer.bias, layer.wide)
    for m in rows:
        product = dataclasses.replace(one_row, m=m)
        if static_obstacle(product, dtype, layer.silu_mul) is None:
            made = choose(product, n_processors, alone=alone)
            yield variant_of(*_definition(product, made, layer.silu_mul, build))


def linear(
    x: torch.Tensor,
    weight: Int4Weight,
    bias: torch.Tensor | None,
    norm: around.Norm | None,
    residual: torch.Tensor | None,
    silu_mul: bool,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """See op.py. Raises ValueError where there is no kernel."""
    launch = prepare(x, weight, bias, norm, residual, silu_mul, out)
    if isinstance(launch, str):
        raise ValueError(f"this product is not for the Hopper kernel: {launch}")
    return launch(x, weight, bias, norm, residual, silu_mul, out)
