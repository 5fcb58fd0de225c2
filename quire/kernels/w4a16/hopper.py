"""Linear layers of 4 bits by the CUDA C++ kernels of `kernels/gemm`, built for codes (csrc/cuda/gemm.h).

Owns which build runs and its arguments. Does not own the kernels nor their tiling (`plan.py`, `gemm/wide.py`).
Invariants: a launch allocates only its result and room for sums, and never waits, so it can be captured; where rows
are alone one kernel, that of many rows, multiplies any number of them.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from collections.abc import Callable

import torch

from quire.kernels import around, jit
from quire.kernels.gemm.hopper import ALIGNMENT_BYTES, DTYPES, MAX_ROWS, Args, WideArgs, n_processors_of
from quire.kernels.gemm.plan import N_AHEAD, Plan, ProductShape
from quire.kernels.gemm.wide import WidePlan, wide_plan
from quire.kernels.hopper import compile_variant, machine_obstacle
from quire.kernels.invariance import are_rows_alone
from quire.kernels.norm import rms_norm
from quire.kernels.w4a16.plan import CHUNK, MAX_FEW_ROWS, Int4Shape, plan
from quire.kernels.w4a16.weight import Int4Weight

ROW_STEP = ALIGNMENT_BYTES // 2
GROUPS = (32, 64, 128)
"""Groups of columns that are less than a chunk."""


@dataclasses.dataclass(frozen=True, slots=True)
class Launch:
    """A compiled kernel and how to cut its product."""

    function: Callable[..., int]
    plan: Plan | WidePlan

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
        m, n = len(x), weight.n
        y = out if residual is None else residual
        if y is None:
            y = torch.empty(m, n // 2 if silu_mul else n, dtype=x.dtype, device=x.device)
        if isinstance(self.plan, WidePlan):
            sums = torch.empty(self.plan.sums_size, dtype=torch.float32, device=x.device)
            args: ctypes.Structure = _wide_arguments(self.plan, x, weight, bias, y, sums)
        else:
            args = _arguments(self.plan, x, weight, bias, residual, y)
        code = self.function(ctypes.byref(args), torch.cuda.current_stream(x.device).cuda_stream)
        if code:
            raise RuntimeError(f"w4a16 {tuple(x.shape)} x [{n}, {weight.k}] could not be launched: CUDA error {code}")
        return y


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
    shape = Int4Shape(m, weight.n, weight.k, weight.group, weight.has_zeros)
    found = _prepared(shape, x.dtype, x.device, *fused, are_rows_alone())
    y = out if residual is None else residual
    if y is None or isinstance(found, str) or not isinstance(found.plan, WidePlan):
        return found
    if (y.data_ptr() | y.stride(0) * y.element_size()) % ALIGNMENT_BYTES:
        return f"rows of the result do not start at multiples of {ALIGNMENT_BYTES} bytes"
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
    product: Int4Shape,
    dtype: torch.dtype,
    device: torch.device,
    silu: bool,
    residual: bool,
    bias: bool,
    wide: bool,
    alone: bool,
) -> Launch | str:
    found = static_obstacle(product, dtype, silu) or machine_obstacle()
    if found:
        return found
    n_processors = n_processors_of(device)
    made = None if alone or product.m > MAX_FEW_ROWS else plan(product, n_processors)
    if made is None:
        shape = ProductShape(product.m, product.n, product.k, silu=silu)
        return load(product, wide_plan(shape, n_processors, alone=alone), dtype, silu, residual, bias, wide)
    return load(product, made, dtype, silu, residual, bias, wide)


def load(
    product: Int4Shape,
    plan: Plan | WidePlan,
    dtype: torch.dtype,
    silu: bool,
    residual: bool,
    bias: bool,
    wide: bool,
) -> Launch | str:
    """The kernel of a plan, compiled if it is new, or why it could not be."""
    macros: dict[str, int] = {
        "BF16": dtype is torch.bfloat16, "RESIDUAL": residual, "SILU": silu, "BIAS": bias, "WIDE": wide,
        "ZEROS": product.zeros,
    }  # fmt: skip
    if isinstance(plan, WidePlan):
        source = "gemm_wide.cu"
        macros |= {"NIBBLES": 2, "TOKENS": plan.tokens, "SPLIT": plan.split}
    else:
        source = "gemm.cu"
        macros |= {
            "NIBBLES": 1, "TOKENS": product.tokens, "CLUSTER": plan.cluster, "GROUPS": plan.groups, "TURNS": 0,
            "RESIDENT": 1, "NORM": 0, "CHUNK_GROUPS": product.chunk_groups,
        }  # fmt: skip
    definitions = tuple(f"-DQUIRE_{name}={int(value)}" for name, value in macros.items())
    try:
        library = ctypes.CDLL(str(compile_variant(source, definitions)))
    except jit.BuildError as error:
        return str(error)
    function = library.quire_gemm_wide if isinstance(plan, WidePlan) else library.quire_gemm
    function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_void_p], ctypes.c_int
    return Launch(function, plan)


def _arguments(
    plan: Plan,
    x: torch.Tensor,
    weight: Int4Weight,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    y: torch.Tensor,
) -> Args:
    m = len(x)
    return Args(
        x.data_ptr(), weight.codes.data_ptr(), None, None if bias is None else bias.data_ptr(),
        None if residual is None else residual.data_ptr(), y.data_ptr(), None, weight.scales.data_ptr(),
        x.stride(0), 0 if residual is None else residual.stride(0), y.stride(0),
        m, weight.n, weight.k, plan.n_clusters, plan.n_stages, N_AHEAD, 1, (m - 1).bit_length(),
        0, 0, weight.group, 0.0,
    )  # fmt: skip


def _wide_arguments(
    plan: WidePlan, x: torch.Tensor, weight: Int4Weight, bias: torch.Tensor | None, y: torch.Tensor, sums: torch.Tensor
) -> WideArgs:
    return WideArgs(
        x.data_ptr(), weight.codes.data_ptr(), None if bias is None else bias.data_ptr(), y.data_ptr(), sums.data_ptr(),
        None, weight.scales.data_ptr(), x.stride(0), y.stride(0),
        len(x), weight.n, weight.k, 0, 0, weight.group, plan.n_teams, plan.n_together,
    )  # fmt: skip


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
