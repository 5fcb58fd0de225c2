"""Latent attention in CUDA C++ for Hopper (csrc/cuda/latent.cu, latent_wide.cu): lines of 512 + 64 numbers in pages.

Owns which builds there are and their launch. Does not own the arguments (launcher.py) nor the plan. Invariant: as
launcher.py's, a launch allocates nothing and never waits.
"""

from __future__ import annotations

import ctypes
import functools

import torch

from quire.kernels import jit
from quire.kernels.attention.hopper import hooks, launcher
from quire.kernels.attention.schedule.pieces import LARGE_ROWS
from quire.kernels.attention.schedule.plan import AttnPlan, Layout
from quire.kernels.attention.schedule.work import CudaWork
from quire.kernels.attention.variant import Variant
from quire.kernels.hopper import FLAGS, build_obstacle

RANK, HEAD_DIM = 512, 576
MIN_ROWS, MAX_ROWS = 16, 64
"""Packed rows of a tile: a large line has two tiles."""
DTYPES = (torch.bfloat16, torch.float16)
MERGE = "quire_latent_merge"


def obstacle(plan: AttnPlan, variant: Variant, q_dtype: torch.dtype, kv_dtype: torch.dtype) -> str | None:
    """Why these kernels cannot run this, or None. Builds what is needed, so the first call takes a while."""
    found = static_obstacle(plan, variant, q_dtype, kv_dtype)
    return found or build_obstacle(lambda: [_library(q_dtype, rows) for _, rows in _launches(plan)])


def static_obstacle(plan: AttnPlan, variant: Variant, q_dtype: torch.dtype, kv_dtype: torch.dtype) -> str | None:
    """Why no machine could run this with these kernels, or None."""
    heads = plan.heads
    if heads.n_kv_heads != 1:
        return f"keys are of {heads.n_kv_heads} heads, not of one"
    if kv_dtype != q_dtype:
        return f"q is {q_dtype} and keys are {kv_dtype}: both must be bfloat16 or both float16"
    if plan.layout is not Layout.PAGED:
        return "keys do not lie in pages that are read from the first on"
    return shape_obstacle(heads.group, heads.head_dim, heads.value_dim, plan.page_size, variant, q_dtype)


def shape_obstacle(
    n_heads: int, head_dim: int, value_dim: int, page_size: int, variant: Variant, dtype: torch.dtype
) -> str | None:
    """The same for n_heads that read one line over pages."""
    if (head_dim, value_dim) != (HEAD_DIM, RANK):
        return f"values are {value_dim} of a key of {head_dim} numbers, not {RANK} of {HEAD_DIM} of one head"
    if dtype not in DTYPES:
        return f"q is {dtype} and keys are {dtype}: both must be bfloat16 or both float16"
    if page_size % launcher.PAGE_STEP:
        return f"page_size {page_size} is not a multiple of {launcher.PAGE_STEP}"
    if n_heads > LARGE_ROWS:
        return f"{n_heads} query heads of a key are more than the {LARGE_ROWS} rows of a line"
    if variant.program.hooks or variant.window or not variant.causal or not variant.softmax or variant.scale <= 0:
        return "the variant is not plain causal attention"
    return None


def run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: AttnPlan,
    variant: Variant,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """See op.py. Raises ValueError where v is not the first part of k's memory, and as launcher.py does."""
    _launch(_arguments(q, k, v, plan, variant, out, lse), _launches(plan), q)


def run_without_merge(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: AttnPlan, variant: Variant, out: torch.Tensor
) -> launcher.Args:
    """The same, but rows of lines that were split stay in parts. Returns the arguments, which say where these are."""
    args = _arguments(q, k, v, plan, variant, out, None)
    _launch(args, [one for one in _launches(plan) if one[0] != MERGE], q)
    return args


def _arguments(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: AttnPlan,
    variant: Variant,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> launcher.Args:
    if v.data_ptr() != k.data_ptr() or v.stride() != k.stride():
        raise ValueError("values must be a view of the first numbers of the keys")
    return launcher.arguments(q, k, v, plan, variant, out, lse)


def _launch(args: launcher.Args, launches: list[tuple[str, int]], q: torch.Tensor) -> None:
    stream = ctypes.c_void_p(torch.cuda.current_stream(q.device).cuda_stream)
    for name, rows in launches:
        code = getattr(_library(q.dtype, rows), name)(ctypes.byref(args), stream)
        if code:
            raise RuntimeError(f"{name} could not be launched: CUDA error {code}")


def _launches(plan: AttnPlan) -> list[tuple[str, int]]:
    """The functions that a plan needs, in their order, each with the rows that its library is compiled for."""
    work: CudaWork = plan.work
    small_rows = min(max(work.small_rows, MIN_ROWS), MAX_ROWS)
    launches = []
    if work.n_small and plan.heads.group <= MAX_ROWS:  # else buffers have room for small lines that never are
        launches.append(("quire_latent_small", small_rows))
    if work.n_large:
        launches.append(("quire_latent_large", MAX_ROWS))
    if work.n_merges:
        launches.append((MERGE, small_rows if work.n_small else MAX_ROWS))
    return launches


def source_of(rows: int) -> str:
    """In csrc/cuda, of the kernel whose tiles have so many packed rows."""
    return "latent_wide.cu" if rows == MAX_ROWS else "latent.cu"


@functools.cache
def _library(dtype: torch.dtype, rows: int) -> ctypes.CDLL:
    """Compiled if it is new. Raises BuildError."""
    flags = [*FLAGS, f"-DQUIRE_BF16={int(dtype is torch.bfloat16)}", f"-DQUIRE_ROWS={rows}"]
    source = jit.sources_folder() / "cuda" / source_of(rows)
    path = jit.shared_library("attention_latent", [source], flags, hooks.header(Variant(1.0).program), "nvcc")
    library = ctypes.CDLL(str(path))
    for name in ("small", "merge", *(["large"] if rows == MAX_ROWS else [])):
        function = getattr(library, f"quire_latent_{name}")
        function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_void_p], ctypes.c_int
    return library
