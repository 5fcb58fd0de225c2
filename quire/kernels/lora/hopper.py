"""Linear layers with adapters in CUDA C++ for Hopper, of steps of few rows: x into the small dimensions
(csrc/cuda/lora.cu), and out of them in the layer's own product (csrc/cuda/gemm/wide_adapters.h).

These are steps of at most 64 rows whose product is estimated to be fastest as one tile of the kernel for many: on 132
multiprocessors from 17 rows on for [4096, 14336], 23 for [4096, 4096], 32 for [6144, 4096], 40 for [28672, 4096].

Owns which layers these are, and both launches. Does not own the product without adapters, whose plan it takes: so a row
without an adapter has the bits that it has in a step without any.
Invariant: a launch allocates only its result and room for sums, and never waits, so it can be captured in a CUDA graph.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
from collections.abc import Callable
from typing import Final

import torch

from quire.kernels.catalog import Slower
from quire.kernels.gemm import Norm
from quire.kernels.gemm.estimate import fastest
from quire.kernels.gemm.hopper import static_obstacle
from quire.kernels.gemm.hopper_product import (
    ALIGNMENT_BYTES,
    Build,
    CompiledProduct,
    function_of,
    lies_wrong,
    n_processors_of,
)
from quire.kernels.gemm.plan import CHUNK, ProductShape
from quire.kernels.gemm.wide import TILE_ROWS, WidePlan, takes_adapters
from quire.kernels.hopper import built, load_variant
from quire.kernels.invariance import are_rows_alone
from quire.kernels.lora.weight import FUSED_RANKS, Stack, Tiles
from quire.kernels.norm import rms_norm

MAX_PARTS: Final = 4
CLUSTER: Final = 8
"""Blocks that share the columns of a tile of rows."""
UNIT, WARPS, MAX_UNITS = 32, 8, 8
"""Columns that a warp takes at once, warps of a block, and units that a warp asks for together."""


class ShrinkArgs(ctypes.Structure):
    """QuireShrinkArgs in csrc/cuda/lora.cu."""

    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("x", "a", "ranks", "order", "tiles", "inner")],
        *[(name, ctypes.c_int64) for name in ("x_row", "a_place", "n_rows")],
        *[(name, ctypes.c_int32) for name in ("k", "most", "n_parts", "n_tiles", "width", "ranks_step")],
    ]  # fmt: skip


class Launch(CompiledProduct):
    """Of a layer [n, k] whose adapters have parts of `sizes` outputs."""

    __slots__ = ("ends", "shrink")

    def __init__(
        self, function: Callable[..., int], plan: WidePlan, shrink: Callable[..., int], sizes: tuple[int, ...]
    ) -> None:
        super().__init__(function, plan)
        self.shrink = shrink
        self.ends = (ctypes.c_int32 * MAX_PARTS)(*itertools.accumulate(sizes))

    def __call__(
        self, x: torch.Tensor, w: torch.Tensor, stack: Stack, tiles: Tiles, bias: torch.Tensor | None,
        norm: Norm | None, residual: torch.Tensor | None, silu_mul: bool, out: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        """See op.py; for the arguments that it was prepared for."""
        if norm is not None:
            x = rms_norm(x, *norm)
        inner = self._inner(x, stack, tiles)
        n_parts, _, width = inner.shape
        adapters = (
            stack.b.data_ptr(), inner.data_ptr(), tiles.tiles.data_ptr(), stack.b.stride(0), len(stack.b),
            len(tiles.tiles), n_parts, width, self.ends,
        )  # fmt: skip
        return self.start(x, w, w.shape, x.dtype, bias, None, residual, silu_mul, out, adapters=adapters)

    def _inner(self, x: torch.Tensor, stack: Stack, tiles: Tiles) -> torch.Tensor:
        """[parts, rows, columns of the adapters that a step may have]."""
        m, n_parts, n_tiles = len(x), len(stack.sizes), len(tiles.tiles)
        width = -(-min(m, len(stack.a)) * stack.most // CHUNK) * CHUNK
        inner = torch.empty(n_parts, m, width, dtype=x.dtype, device=x.device)
        args = ShrinkArgs(
            x.data_ptr(), stack.a.data_ptr(), stack.ranks.data_ptr(), tiles.order.data_ptr(), tiles.tiles.data_ptr(),
            inner.data_ptr(), x.stride(0), stack.a.stride(0), m, x.shape[1], stack.most, n_parts, n_tiles, width,
            stack.ranks.stride(0),
        )  # fmt: skip
        code = self.shrink(ctypes.byref(args), torch.cuda.current_stream(x.device).cuda_stream)
        if code:
            raise RuntimeError(f"A of {n_parts} parts for x {tuple(x.shape)} could not be launched: CUDA error {code}")
        return inner


def prepare(
    x: torch.Tensor, w: torch.Tensor, stack: Stack, tiles: Tiles, bias: torch.Tensor | None,
    norm: Norm | None, residual: torch.Tensor | None, silu_mul: bool, out: torch.Tensor | None,
) -> Launch | str:  # fmt: skip
    """`linear` ready for these arguments, or why it is not for these kernels. Compiles what is new (seconds)."""
    wide = out is not None and out.dtype != x.dtype
    has = (silu_mul, residual is not None, bias is not None, wide)
    found = _prepared(len(x), *w.shape, x.dtype, x.device, *has, stack.sizes, stack.most, are_rows_alone())
    if isinstance(found, str):
        return found
    starts = x.data_ptr() | w.data_ptr() | stack.a.data_ptr() | stack.b.data_ptr()
    rows = x.stride(0) | stack.a.stride(0) | stack.b.stride(0)
    if (starts | rows * x.element_size()) % ALIGNMENT_BYTES:
        return f"x, w or the adapters do not start at multiples of {ALIGNMENT_BYTES} bytes"
    y = out if residual is None else residual
    return found if y is None else lies_wrong(y) or found


@functools.cache
def _prepared(
    m: int, n: int, k: int, dtype: torch.dtype, device: torch.device, silu: bool, residual: bool, bias: bool,
    wide: bool, sizes: tuple[int, ...], most: int, alone: bool,
) -> Launch | str:  # fmt: skip
    product, build = ProductShape(m, n, k, silu=silu), Build(dtype, residual, bias, wide)
    if alone:
        return Slower("rows have the bits that they have in any number of rows")
    found = _parts_obstacle(sizes, most, silu) or static_obstacle(product, dtype)
    if found:
        return Slower(found)

    def make() -> Launch | str:
        plan = fastest(product, n_processors_of(device))
        if not isinstance(plan, WidePlan) or not takes_adapters(product, plan):
            return Slower(f"{m} rows of [{n}, {k}] are not one tile of the kernel for many rows")
        return Launch(function_of(product, plan, build, {"RANK": most}), plan, _shrink(dtype, k), sizes)

    return built(make)


def _parts_obstacle(sizes: tuple[int, ...], most: int, silu: bool) -> str | None:
    if most not in FUSED_RANKS:
        return f"there is room for ranks to {most}: it must be one of {FUSED_RANKS}"
    if silu and (len(sizes) != 2 or sizes[0] != sizes[1]):
        return f"parts of {sizes} are no gates and as many ups"
    if not silu and (len(sizes) > MAX_PARTS or any(size % TILE_ROWS for size in sizes[:-1])):
        return f"parts of {sizes} do not begin where tiles of {TILE_ROWS} rows do"
    return None


def variant_of(dtype: torch.dtype, k: int) -> tuple[str, tuple[str, ...]]:
    """Source and definitions of the kernel for the first of both products, of x [n, k]: for `compile_variant`."""
    units = min(MAX_UNITS, math.ceil(k / (UNIT * WARPS * CLUSTER)))
    macros = {"BF16": dtype is torch.bfloat16, "CLUSTER": CLUSTER, "UNITS": units}
    return "lora.cu", tuple(f"-DQUIRE_{name}={int(value)}" for name, value in macros.items())


@functools.cache
def _shrink(dtype: torch.dtype, k: int) -> Callable[..., int]:
    """Raises BuildError."""
    function = load_variant(*variant_of(dtype, k)).quire_shrink
    function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_void_p], ctypes.c_int
    return function
