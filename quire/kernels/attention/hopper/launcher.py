"""Attention in CUDA C++ for Hopper (csrc/cuda): TMA, wgmma, built by the JIT with nvcc once for each variant and shape.

Owns which builds there are, their arguments and their launch. Does not own the kernels nor the plan.
Invariant: a launch allocates nothing and never waits, so it can be captured in a CUDA graph.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import dataclasses
import functools
import math

import torch

from quire.kernels import jit
from quire.kernels.attention.hopper import hooks
from quire.kernels.attention.schedule.plan import AttnPlan, Layout
from quire.kernels.attention.schedule.work import CudaWork
from quire.kernels.attention.variant import MAX_PARAMS, Program, Variant
from quire.kernels.catalog import Slower
from quire.kernels.e4m3 import E4M3
from quire.kernels.hopper import FLAGS, build_obstacle
from quire.kernels.kvstore import entry

HEAD_DIMS = (64, 96, 128, 192, 256)
PAGE_STEP = 8
"""Pages are whole multiples of the 8 rows that a swizzled tile of shared memory repeats after."""
ALIGNMENT_BYTES = 16


class Args(ctypes.Structure):
    """QuireAttnArgs in csrc/cuda/attention.h."""

    _fields_ = [
        *[(name, ctypes.c_void_p) for name in (
            "q", "k", "v", "out", "lse", "small_lines", "large_lines", "queue", "rows", "pages", "blocks", "merges",
            "parts", "partial_out", "partial_lse", "ticket",
        )],
        *[(name, ctypes.c_int64) for name in (
            "q_row", "q_head", "k_page", "k_head", "k_token", "v_page", "v_head", "v_token", "n_pages",
        )],
        *[(name, ctypes.c_int32) for name in (
            "n_ctas", "n_large", "n_merges", "page_size", "n_q_heads", "n_kv_heads", "head_dim", "window", "n_first",
            "settled", "one_merge",
        )],
        ("scale", ctypes.c_float),
        ("v_scale", ctypes.c_float),
        ("scalars", ctypes.c_float * MAX_PARAMS),
        ("inverses", ctypes.c_float * MAX_PARAMS),
        ("tensors", ctypes.c_void_p * MAX_PARAMS),
    ]  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class Build:
    """What one library is compiled for."""

    source: str
    """In csrc/cuda."""
    program: Program
    head_dim: int
    dtype: torch.dtype
    layout: Layout
    n_rows: int
    """Most packed rows of a small line."""
    coded: bool = False
    """Pages hold e4m3."""


def obstacle(plan: AttnPlan, variant: Variant, q_dtype: torch.dtype, kv_dtype: torch.dtype) -> str | None:
    """Why these kernels cannot run this, or None. Builds what is needed, so the first call takes a while."""
    found = static_obstacle(plan, variant, q_dtype, kv_dtype)
    return found or build_obstacle(lambda: _build(plan, variant, q_dtype))


def _build(plan: AttnPlan, variant: Variant, q_dtype: torch.dtype) -> None:
    """Raises BuildError."""
    builds = {build for _, build in _launches(plan, variant, q_dtype)}
    with concurrent.futures.ThreadPoolExecutor() as pool:
        list(pool.map(library, builds))


def static_obstacle(plan: AttnPlan, variant: Variant, q_dtype: torch.dtype, kv_dtype: torch.dtype) -> str | None:
    """Why no machine could run this with these kernels, or None."""
    if kv_dtype == E4M3:
        return Slower(f"keys of {kv_dtype} have a kernel of their own")
    if kv_dtype != q_dtype:
        return f"q is {q_dtype} and keys are {kv_dtype}: both must be bfloat16 or both float16"
    if plan.heads.value_dim:
        return Slower(f"values of {plan.heads.value_dim} dimensions and keys of {plan.heads.head_dim} have own kernels")
    page_size = PAGE_STEP if plan.layout is Layout.RAGGED else plan.page_size
    return shape_obstacle(plan.heads.head_dim, page_size, variant, q_dtype)


def shape_obstacle(head_dim: int, page_size: int, variant: Variant, dtype: torch.dtype) -> str | None:
    """The same for heads over pages, queries and keys of one type."""
    if dtype not in (torch.bfloat16, torch.float16):
        return f"q is {dtype} and keys are {dtype}: both must be bfloat16 or both float16"
    if head_dim not in HEAD_DIMS:
        return f"head_dim {head_dim} is not one of {HEAD_DIMS}"
    if page_size % PAGE_STEP:
        return f"page_size {page_size} is not a multiple of {PAGE_STEP}"
    others = sorted(set(variant.program.hooks) - set(hooks.HOOKS))
    if others:
        return f"the variant has a {' and a '.join(others)}"
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
    """See op.py. Raises ValueError for addresses or strides that are not multiples of 16 bytes."""
    args = arguments(q, k, v, plan, variant, out, lse)
    for name, build in _launches(plan, variant, q.dtype):
        launch(name, build, args, q.device)


def launch(name: str, build: Build, args: Args, device: torch.device) -> None:
    """Run a function of a library on the device's current stream."""
    stream = ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream)
    code = getattr(library(build), name)(ctypes.byref(args), stream)
    if code:
        raise RuntimeError(f"{name} could not be launched: CUDA error {code}")


def decode_build(plan: AttnPlan, variant: Variant, dtype: torch.dtype, *, coded: bool = False) -> Build:
    """The library that has the functions for small lines, and for merges."""
    shape = plan.heads.head_dim, dtype, plan.layout, plan.work.small_rows
    return Build("decode.cu", variant.program, *shape, coded)


def prefill_build(plan: AttnPlan, variant: Variant, dtype: torch.dtype) -> Build:
    """The library that has the function for large lines."""
    return Build("prefill.cu", variant.program, plan.heads.head_dim, dtype, plan.layout, 0)


def _launches(plan: AttnPlan, variant: Variant, dtype: torch.dtype) -> list[tuple[str, Build]]:
    """The functions that a plan needs, in their order, each with the library that has it."""
    work: CudaWork = plan.work
    decode = decode_build(plan, variant, dtype)
    launches = []
    if work.n_small:
        launches.append(("quire_attention_small", decode))
    if work.n_large:
        launches.append(("quire_attention_large", prefill_build(plan, variant, dtype)))
    if work.n_merges:
        launches.append(("quire_attention_merge", decode))
    return launches


def macros(build: Build) -> dict[str, int]:
    """What a library is compiled with, names without QUIRE_."""
    return {
        "HEAD_DIM": build.head_dim,
        "BF16": int(build.dtype is torch.bfloat16),
        "LAYOUT": int(build.layout),
        "ROWS": build.n_rows,
        "CODED": int(build.coded),
    }


@functools.cache
def library(build: Build) -> ctypes.CDLL:
    """Compiled if it is new. Raises BuildError."""
    flags = [*FLAGS, *(f"-DQUIRE_{name}={value}" for name, value in macros(build).items())]
    source = jit.sources_folder() / "cuda" / build.source
    path = jit.shared_library(f"attention_{source.stem}", [source], flags, hooks.header(build.program), "nvcc")
    loaded = ctypes.CDLL(str(path))
    for name in ("small", "large", "merge"):
        function = getattr(loaded, f"quire_attention_{name}", None)
        if function is not None:
            function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_void_p], ctypes.c_int
    return loaded


def arguments(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: AttnPlan,
    variant: Variant,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    scales: entry.Scales = entry.UNIT,
) -> Args:
    """What the kernels are told. Raises ValueError for addresses or strides that are not multiples of 16 bytes."""
    work: CudaWork = plan.work
    heads = plan.heads
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        sizes = [tensor.data_ptr(), *(stride * tensor.element_size() for stride in tensor.stride()[:-1])]
        if any(size % ALIGNMENT_BYTES for size in sizes):
            raise ValueError(f"{name}: address and strides must be multiples of {ALIGNMENT_BYTES} bytes; copy it")
    strides = []
    for tensor in (k, v):
        page, head, token = tensor.stride()[:3] if tensor.dim() == 4 else (0, tensor.stride(1), tensor.stride(0))
        strides += [page, head, token]
    args = Args(
        q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), lse.data_ptr() if lse is not None else None,
        work.small.data_ptr() if work.n_small else None, work.large.data_ptr(), work.queue.data_ptr(),
        work.rows.data_ptr(), plan.page_table.data_ptr() if plan.page_table is not None else None,
        work.blocks.data_ptr(), work.merges.data_ptr(), work.parts.data_ptr(), work.partial_out.data_ptr(),
        work.partial_lse.data_ptr(), work.ticket.data_ptr(), q.stride(0), q.stride(1), *strides, k.shape[0],
        work.n_ctas, work.n_large, work.n_merges, plan.page_size, heads.n_q_heads, heads.n_kv_heads, heads.head_dim,
        variant.window, variant.n_first, plan.settled, plan.batch_invariant,
        variant.scale * scales.k, scales.v,
    )  # fmt: skip
    for slot, value in enumerate(variant.scalars.values()):
        args.scalars[slot] = value
        args.inverses[slot] = 1.0 / value if value else math.inf
    for slot, tensor in enumerate(variant.tensors.values()):
        args.tensors[slot] = tensor.data_ptr()
    return args
