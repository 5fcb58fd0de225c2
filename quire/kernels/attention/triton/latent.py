"""Latent attention in Triton: launches of latent_kernels.py, for plans whose values are the first numbers of the keys.

Owns block sizes and grids. Does not own the lines of work (schedule/work.py). As launcher.py, a step with fixed buffers
can be captured in a CUDA graph.
"""

from __future__ import annotations

from typing import Any

import torch
import triton

from quire.kernels.attention.schedule.plan import AttnPlan, Layout
from quire.kernels.attention.triton import hooks, kernels, latent_kernels
from quire.kernels.attention.variant import Variant

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LARGE_ROWS = 128
"""Packed rows of a large line, at most."""
MAX_RANK, MAX_ROPE = 512, 128
"""Dimensions of a value, and of a key beyond them: what a tile holds in registers and shared memory."""


def obstacle(plan: AttnPlan, variant: Variant, q_dtype: torch.dtype, kv_dtype: torch.dtype) -> str | None:
    """Why these kernels cannot run this, in one sentence, or None."""
    heads = plan.heads
    if not heads.value_dim or heads.n_kv_heads != 1:
        return f"values of {heads.n_kv_heads} heads and {heads.out_dim} dimensions are not a part of one head's keys"
    if q_dtype not in DTYPES or kv_dtype != q_dtype:
        return f"q is {q_dtype} and keys are {kv_dtype}: both must be one of {', '.join(map(str, DTYPES))}"
    if heads.value_dim > MAX_RANK or heads.head_dim - heads.value_dim not in range(1, MAX_ROPE + 1):
        return f"values of {heads.value_dim} of {heads.head_dim} dimensions are not at most {MAX_RANK} and {MAX_ROPE}"
    if heads.group > LARGE_ROWS:
        return f"{heads.group} query heads are more than the {LARGE_ROWS} rows of a tile"
    if variant.program.hooks or variant.window or not variant.causal or not variant.softmax or variant.scale <= 0:
        return "the variant is not plain causal attention"
    return None if plan.layout is Layout.PAGED else "keys do not lie in pages that are read from the first on"


def run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: AttnPlan,
    variant: Variant,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """See op.py. Raises ValueError where v is not the first part of k's memory."""
    work, heads = plan.work, plan.heads
    if v.data_ptr() != k.data_ptr() or v.stride() != k.stride():
        raise ValueError("values must be a view of the first numbers of the keys")
    shared = (
        q, k, out, out if lse is None else lse, work.rows, plan.paged_table, work.partial_out, work.partial_lse,
        q.stride(0), q.stride(1), k.stride(0), k.stride(2), variant.scale,
    )  # fmt: skip
    if work.n_small:
        constants = _constants(plan, q, max(16, work.small_rows), lse)
        latent_kernels.small[(work.n_ctas,)](work.small, work.queue, *shared, **constants)
    if work.n_large:
        rows = 64 if q.element_size() <= 2 else 16
        chunks = LARGE_ROWS // rows
        constants = _constants(plan, q, rows, lse) | {"CHUNKS": chunks}
        latent_kernels.large[(work.n_large * chunks,)](work.large, *shared, **constants)
    if work.n_merges:
        lowered = hooks.of(variant)
        kernels.merge[(work.n_merges, heads.group)](
            work.merges, work.parts, work.partial_out, work.partial_lse, out, out if lse is None else lse, 1,
            lowered.params, GROUP=heads.group, D=heads.out_dim, BLOCK_D=_padded(heads.out_dim), SOFTMAX=True,
            HAS_LSE=lse is not None, num_warps=4, **lowered.merging(),
        )  # fmt: skip


def _constants(plan: AttnPlan, q: torch.Tensor, rows: int, lse: torch.Tensor | None) -> dict[str, Any]:
    """What is compiled in."""
    rank, rope = plan.heads.out_dim, plan.heads.head_dim - plan.heads.out_dim
    keys, warps, stages = blocking(rows, (_padded(rank) + _padded(rope)) * q.element_size())
    return {
        "PAGE": plan.page_size, "GROUP": plan.heads.group, "RANK": rank, "ROPE": rope, "BLOCK_R": _padded(rank),
        "BLOCK_D": _padded(rope), "BLOCK_M": rows, "BLOCK_N": keys, "HAS_LSE": lse is not None, "num_warps": warps,
        "num_stages": stages,
    }  # fmt: skip


def _padded(dim: int) -> int:
    return max(16, int(triton.next_power_of_2(dim)))


def blocking(n_rows: int, line_bytes: int) -> tuple[int, int, int]:
    """(keys of a block, warps, pipeline stages) for n_rows packed rows over lines of line_bytes.

    Chosen by what compiles without many spills, not by time. Lines of 576 numbers of 2 bytes are 36 KiB in 32 keys, and
    64 queries of them 72 KiB. A page table takes two loads, so s stages are (s - 1) // 2 blocks in flight.
    """
    if line_bytes > 1280:
        return 16, 8 if n_rows >= 64 else 4, 2
    return (32, 8, 3) if n_rows >= 64 else (32, 8, 7)
