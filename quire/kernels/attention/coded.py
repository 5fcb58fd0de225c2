"""Attention over pages in e4m3 for Hopper: CUDA C++ for small lines (csrc/cuda/decode.cu), Triton for large ones.

Small lines are bound by memory, so half the bytes are what counts; large lines are bound by products, and Triton's
kernel converts keys on their way to them. Parts of both are merged by decode.cu's. Owns which function runs which
lines. Does not own the arguments (hopper/launcher.py) nor the plan. Invariant: as their launchers', a launch
allocates nothing and never waits.
"""

from __future__ import annotations

import torch

from quire.kernels import jit
from quire.kernels.attention.hopper import launcher
from quire.kernels.attention.schedule.plan import AttnPlan, Layout
from quire.kernels.attention.schedule.work import CudaWork
from quire.kernels.attention.triton import launcher as triton
from quire.kernels.attention.variant import Variant
from quire.kernels.e4m3 import E4M3
from quire.kernels.hopper import machine_obstacle
from quire.kernels.kvstore import entry


def obstacle(plan: AttnPlan, variant: Variant, q_dtype: torch.dtype, kv_dtype: torch.dtype) -> str | None:
    """Why these kernels cannot run this, or None. Builds what is needed, so the first call takes a while."""
    found = static_obstacle(plan, variant, q_dtype, kv_dtype) or machine_obstacle()
    if found:
        return found
    try:
        if plan.work.n_small or plan.work.n_merges:
            launcher.library(launcher.decode_build(plan, variant, q_dtype, coded=True))
    except jit.BuildError as error:
        return str(error)
    return None


def static_obstacle(plan: AttnPlan, variant: Variant, q_dtype: torch.dtype, kv_dtype: torch.dtype) -> str | None:
    """Why no machine could run this with these kernels, or None."""
    if kv_dtype != E4M3:
        return f"keys are {kv_dtype}, not {E4M3}"
    if plan.layout is Layout.RAGGED:
        return "keys do not lie in pages"
    found = launcher.shape_obstacle(plan.heads.head_dim, plan.page_size, variant, q_dtype)
    return found or triton.obstacle(plan, variant, q_dtype, kv_dtype)


def run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: AttnPlan,
    variant: Variant,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    scales: entry.Scales = entry.UNIT,
) -> None:
    """See op.py. Raises ValueError for tokens of a page that are not contiguous, and as hopper/launcher.py does."""
    if k.stride(2) != plan.heads.head_dim or v.stride(2) != plan.heads.head_dim:
        raise ValueError(f"k and v, with strides {k.stride()} and {v.stride()}: tokens of a page must be contiguous")
    work: CudaWork = plan.work
    args = launcher.arguments(q, k, v, plan, variant, out, lse, scales)
    decode = launcher.decode_build(plan, variant, q.dtype, coded=True)
    if work.n_small:
        launcher.launch("quire_attention_small", decode, args, q.device)
    if work.n_large:
        triton.run_large(q, k, v, plan, variant, out, lse, scales)
    if work.n_merges:
        launcher.launch("quire_attention_merge", decode, args, q.device)
