"""Linear layers in CUDA C++ for Hopper (csrc/cuda/gemm.cu, gemm_wide.cu), built by the JIT once for each variant.

Owns which builds there are, their arguments and their launch. Does not own the kernels, their tiling (plan.py, wide.py)
nor which is best (estimate.py). Invariant: a launch allocates only its result and room for sums, and never waits, so it
can be captured in a CUDA graph.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from collections.abc import Callable

import torch

from quire.kernels import jit
from quire.kernels.around import Norm
from quire.kernels.gemm.estimate import fastest
from quire.kernels.gemm.plan import CHUNK, MAX_NORM_ROWS, N_AHEAD, Plan, ProductShape
from quire.kernels.gemm.wide import WidePlan
from quire.kernels.hopper import compile_variant, machine_obstacle
from quire.kernels.invariance import are_rows_alone
from quire.kernels.norm import rms_norm

DTYPES = (torch.bfloat16, torch.float16)
ALIGNMENT_BYTES = 16
ROW_STEP = 8
"""As many elements of `DTYPES` take `ALIGNMENT_BYTES`."""
MAX_ROWS = 1 << 16


class Args(ctypes.Structure):
    """QuireGemmArgs in csrc/cuda/gemm/block.h."""

    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("x", "w", "norm_weight", "bias", "residual", "y", "x_scale", "w_scale")],
        *[(name, ctypes.c_int64) for name in ("x_row", "residual_row", "y_row")],
        *[(name, ctypes.c_int32) for name in (
            "m", "n", "k", "n_clusters", "n_stages", "n_ahead", "dependent", "token_bits",
            "x_scale_step", "w_scale_step", "group",
        )],
        ("eps", ctypes.c_float),
    ]  # fmt: skip


class WideArgs(ctypes.Structure):
    """QuireWideArgs in csrc/cuda/gemm_wide.cu."""

    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("x", "w", "bias", "y", "sums", "x_scale", "w_scale")],
        *[(name, ctypes.c_int64) for name in ("x_row", "y_row")],
        *[(name, ctypes.c_int32) for name in (
            "m", "n", "k", "x_scale_step", "w_scale_step", "group", "n_teams", "n_together",
        )],
    ]  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class Build:
    """What one library is compiled for, beside its plan."""

    dtype: torch.dtype
    residual: bool
    bias: bool
    wide: bool
    """The result is float32."""
    fp8: int = 0
    """QUIRE_FP8 in csrc/cuda/gemm.h."""


@dataclasses.dataclass(frozen=True, slots=True)
class Launch:
    """A compiled kernel and how to cut its product."""

    function: Callable[..., int]
    plan: Plan | WidePlan

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
        m, n = x.shape[0], w.shape[0]
        y = out if residual is None else residual
        if y is None:
            y = torch.empty(m, n // 2 if silu_mul else n, dtype=x.dtype, device=x.device)
        if isinstance(self.plan, WidePlan):
            sums = torch.empty(self.plan.sums_size, dtype=torch.float32, device=x.device)
            args: ctypes.Structure = _wide_arguments(self.plan, x, w, bias, y, sums)
        else:
            args = _arguments(self.plan, x, w, bias, norm, residual, y)
        code = self.function(ctypes.byref(args), torch.cuda.current_stream(x.device).cuda_stream)
        if code:
            raise RuntimeError(f"gemm {tuple(x.shape)} x {tuple(w.shape)} could not be launched: CUDA error {code}")
        return y


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
    found = _prepared(x.shape[0], *w.shape, x.dtype, x.device, *fused, are_rows_alone())
    y = out if residual is None else residual
    if y is None or isinstance(found, str) or not isinstance(found.plan, WidePlan):
        return found
    if (y.data_ptr() | y.stride(0) * y.element_size()) % ALIGNMENT_BYTES:
        return f"rows of the result do not start at multiples of {ALIGNMENT_BYTES} bytes"
    return found


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
) -> Launch | str:
    product, build = ProductShape(m, n, k, norm, silu), Build(dtype, residual, bias, wide)
    found = static_obstacle(product, build.dtype) or machine_obstacle()
    if found:
        return found
    made = fastest(product, n_processors_of(device), alone)
    if isinstance(made, str):
        return made
    try:
        return load(product, made, build)
    except jit.BuildError as error:
        return str(error)


@functools.cache
def n_processors_of(device: torch.device) -> int:
    """Multiprocessors of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def load(product: ProductShape, plan: Plan | WidePlan, build: Build) -> Launch:
    """The kernel of a plan, compiled if it is new. Raises BuildError."""
    return Launch(function_of(product, plan, build), plan)


def function_of(product: ProductShape, plan: Plan | WidePlan, build: Build) -> Callable[..., int]:
    """The library's function for a plan. Raises BuildError."""
    library = ctypes.CDLL(str(compile_variant(*variant_of(product, plan, build))))
    function = library.quire_gemm_wide if isinstance(plan, WidePlan) else library.quire_gemm
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    function.restype = ctypes.c_int
    return function


def variant_of(product: ProductShape, plan: Plan | WidePlan, build: Build) -> tuple[str, tuple[str, ...]]:
    """(source in csrc/cuda, definitions): what tells the library of a plan from others."""
    macros: dict[str, int] = {
        "SILU": product.silu,
        "BF16": build.dtype is torch.bfloat16,
        "RESIDUAL": build.residual,
        "BIAS": build.bias,
        "WIDE": build.wide,
        "FP8": build.fp8,
    }
    if isinstance(plan, WidePlan):
        source = "gemm_wide.cu"
        macros |= {"TOKENS": plan.tokens, "SPLIT": plan.split}
    else:
        source = "gemm.cu"
        macros |= {
            "TOKENS": product.tokens,
            "CLUSTER": plan.cluster,
            "GROUPS": plan.groups,
            "TURNS": plan.turns,
            "RESIDENT": plan.resident,
            "NORM": product.norm,
        }
    return source, tuple(f"-DQUIRE_{name}={int(value)}" for name, value in macros.items())


def _arguments(
    plan: Plan,
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    norm: Norm | None,
    residual: torch.Tensor | None,
    y: torch.Tensor,
) -> Args:
    m, (n, k) = x.shape[0], w.shape
    return Args(
        x.data_ptr(), w.data_ptr(), None if norm is None else norm[0].data_ptr(),
        None if bias is None else bias.data_ptr(), None if residual is None else residual.data_ptr(), y.data_ptr(),
        None, None, x.stride(0) if m > 1 else k, 0 if residual is None else residual.stride(0), y.stride(0),
        m, n, k, plan.n_clusters, plan.n_stages, N_AHEAD, 1, (m - 1).bit_length(), 0, 0, 0,
        0.0 if norm is None else norm[1],
    )  # fmt: skip


def _wide_arguments(
    plan: WidePlan, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, y: torch.Tensor, sums: torch.Tensor
) -> WideArgs:
    return WideArgs(
        x.data_ptr(), w.data_ptr(), None if bias is None else bias.data_ptr(), y.data_ptr(), sums.data_ptr(),
        None, None, x.stride(0), y.stride(0), x.shape[0], *w.shape, 0, 0, 0, plan.n_teams, plan.n_together,
    )  # fmt: skip


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
