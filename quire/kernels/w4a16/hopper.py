"""Linear layers of 4 bits for few rows by the CUDA C++ kernel of `kernels/gemm`, built for codes (csrc/cuda/gemm.h).

Owns which build runs and its arguments. Does not own the kernel nor its tiling (`plan.py`). Invariant: a launch
allocates only its result and never waits, so it can be captured.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from collections.abc import Callable

import torch

from quire.kernels import around, jit
from quire.kernels.gemm.hopper import ALIGNMENT_BYTES, DTYPES, Args, n_processors_of
from quire.kernels.gemm.plan import N_AHEAD, Plan
from quire.kernels.hopper import compile_variant, machine_obstacle
from quire.kernels.invariance import are_rows_alone
from quire.kernels.norm import rms_norm
from quire.kernels.w4a16.plan import CHUNK, MAX_ROWS, CodesShape, plan
from quire.kernels.w4a16.weight import Int4Weight

ROW_STEP = ALIGNMENT_BYTES // 2
GROUPS = (32, 64, 128)
"""Groups of columns that are less than a chunk."""


@dataclasses.dataclass(frozen=True, slots=True)
class Launch:
    """A compiled kernel and how to cut its product."""

    function: Callable[..., int]
    plan: Plan

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
        m, n, k = len(x), weight.n, weight.k
        y = out if residual is None else residual
        if y is None:
            y = torch.empty(m, n // 2 if silu_mul else n, dtype=x.dtype, device=x.device)
        args = Args(
            x.data_ptr(), weight.codes.data_ptr(), None, None if bias is None else bias.data_ptr(),
            None if residual is None else residual.data_ptr(), y.data_ptr(), None, weight.scales.data_ptr(),
            x.stride(0), 0 if residual is None else residual.stride(0), y.stride(0),
            m, n, k, self.plan.n_clusters, self.plan.n_stages, N_AHEAD, 1, (m - 1).bit_length(),
            0, 0, weight.group, 0.0,
        )  # fmt: skip
        code = self.function(ctypes.byref(args), torch.cuda.current_stream(x.device).cuda_stream)
        if code:
            raise RuntimeError(f"w4a16 {tuple(x.shape)} x [{n}, {k}] could not be launched: CUDA error {code}")
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
    if are_rows_alone():
        return "more rows than it takes are summed in another order"
    if (weight.codes.data_ptr() | weight.scales.data_ptr()) % ALIGNMENT_BYTES:
        return f"the address of the weights is not a multiple of {ALIGNMENT_BYTES} bytes"
    fused = (silu_mul, residual is not None, bias is not None, out is not None and out.dtype != x.dtype)
    shape = CodesShape(m, weight.n, weight.k, weight.group, weight.has_zeros)
    return _prepared(shape, x.dtype, x.device, *fused)


def static_obstacle(product: CodesShape, dtype: torch.dtype, silu_mul: bool) -> str | None:
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
    product: CodesShape, dtype: torch.dtype, device: torch.device, silu: bool, residual: bool, bias: bool, wide: bool
) -> Launch | str:
    found = static_obstacle(product, dtype, silu) or machine_obstacle()
    if found:
        return found
    made = plan(product, n_processors_of(device))
    if made is None:
        return f"a slice of {product.m} rows of {product.k} columns does not fit shared memory"
    macros = {
        "BF16": dtype is torch.bfloat16, "TOKENS": product.tokens, "CLUSTER": made.cluster, "GROUPS": made.groups,
        "TURNS": 0, "RESIDENT": 1, "NORM": 0, "RESIDUAL": residual, "SILU": silu, "BIAS": bias, "WIDE": wide,
        "NIBBLES": 1, "ZEROS": product.zeros, "CHUNK_GROUPS": product.chunk_groups,
    }  # fmt: skip
    definitions = tuple(f"-DQUIRE_{name}={int(value)}" for name, value in macros.items())
    try:
        function = ctypes.CDLL(str(compile_variant("gemm.cu", definitions))).quire_gemm
    except jit.BuildError as error:
        return str(error)
    function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_void_p], ctypes.c_int
    return Launch(function, made)


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
