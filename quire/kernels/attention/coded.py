"""Attention over pages in e4m3 for Hopper: CUDA C++ for small lines (csrc/cuda/decode.cu) and large ones (prefill.cu).

Small lines are bound by memory, so half the bytes are what counts. Large lines are bound by products: the pages that
they read are widened first, and the kernel of pages of the activations' type multiplies. Triton's kernel, which takes
2.5 times as long, converts keys on their way: where work has fixed buffers, where a row's bits must not depend on its
neighbours, and where few rows read much. Parts of all are merged by decode.cu's. Owns which function runs which lines.
Does not own the arguments (hopper/launcher.py) nor the plan. Invariant: nothing waits, and where work has fixed buffers
nothing is allocated.
"""

from __future__ import annotations

import torch

from quire.kernels.attention.hopper import launcher
from quire.kernels.attention.schedule.plan import AttnPlan, Layout
from quire.kernels.attention.schedule.work import CudaWork
from quire.kernels.attention.triton import launcher as triton
from quire.kernels.attention.triton import widening
from quire.kernels.attention.variant import Variant
from quire.kernels.e4m3 import E4M3
from quire.kernels.hopper import build_obstacle
from quire.kernels.kvstore import entry
from quire.planner.memory import WIDENED_BYTES

LEAST_ROWS = 256
"""Packed rows that must read a key for it to be widened: 6 bytes a number moved at 3.5 TB/s, against 4 flops a number
and row at 560 in place of 228 TFLOP/s, and a launch (docs/lab-notes.md, "Keys and values in e4m3 on GPUs")."""


def obstacle(plan: AttnPlan, variant: Variant, q_dtype: torch.dtype, kv_dtype: torch.dtype) -> str | None:
    """Why these kernels cannot run this, or None. Builds what is needed, so the first call takes a while."""
    found = static_obstacle(plan, variant, q_dtype, kv_dtype)
    return found or build_obstacle(lambda: _build(plan, variant, q_dtype))


def _build(plan: AttnPlan, variant: Variant, q_dtype: torch.dtype) -> None:
    """Raises BuildError."""
    if plan.work.n_small or plan.work.n_merges:
        launcher.library(launcher.decode_build(plan, variant, q_dtype, coded=True))
    if plan.work.n_large and plan.layout is Layout.PAGED:  # also if these are not widened: the next plan's may be
        launcher.library(launcher.prefill_build(plan, variant, q_dtype))


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
    large = None
    if work.entries is not None and widens(plan, k, q.element_size()):
        # Before small lines: the kernel of large ones may start with theirs, which waits for what was launched before.
        wide_k, wide_v, table = widening.widened(k, v, plan.paged_table, work.entries, q.dtype)
        large = launcher.arguments(q, wide_k, wide_v, plan.on(table), variant, out, lse, scales)
    if work.n_small:
        launcher.launch("quire_attention_small", decode, args, q.device)
    if large is not None:
        launcher.launch("quire_attention_large", launcher.prefill_build(plan, variant, q.dtype), large, q.device)
    elif work.n_large:
        triton.run_large(q, k, v, plan, variant, out, lse, scales)
    if work.n_merges:
        launcher.launch("quire_attention_merge", decode, args, q.device)


def widens(plan: AttnPlan, k: torch.Tensor, itemsize: int) -> bool:
    """Whether what large lines read is widened: it pays, and takes no more memory than the memory equation counts."""
    work: CudaWork = plan.work
    if work.entries is None:
        return False
    n_entries, heads = len(work.entries), plan.heads
    n_bytes = 2 * n_entries * k[0].numel() * itemsize + plan.paged_table.nbytes
    pays = work.n_large_pairs * heads.group >= LEAST_ROWS * n_entries * plan.page_size
    return pays and n_bytes <= WIDENED_BYTES
