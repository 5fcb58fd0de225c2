"""Attention in Triton: launches of kernels.py for any CUDA device, every layout and every hook.

Owns block sizes and grids. Does not own the lines of work (schedule/work.py). Nothing waits for the device; grids
depend on the work's launch sizes alone, so that a step with fixed buffers can be captured in a CUDA graph.
"""

from __future__ import annotations

from typing import Any

import torch
import triton

from quire.kernels.attention.schedule.plan import AttnPlan, Layout
from quire.kernels.attention.triton import hooks, kernels
from quire.kernels.attention.variant import Variant
from quire.kernels.e4m3 import E4M3
from quire.kernels.kvstore import entry

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
KINDS = {E4M3: 1, torch.int8: 2}
"""Type of pages of 8 bits → CODED of the kernels: one scale of all keys, or one behind each entry."""
LARGE_ROWS = 128
"""Packed rows of a large line, at most."""
MAX_HEAD_DIM = 256


def obstacle(plan: AttnPlan, variant: Variant, q_dtype: torch.dtype, kv_dtype: torch.dtype) -> str | None:
    """Why these kernels cannot run this, in one sentence, or None."""
    if q_dtype not in DTYPES:
        return f"q is {q_dtype}: Triton's kernels take {', '.join(map(str, DTYPES))}"
    if kv_dtype not in (q_dtype, *KINDS):
        return f"keys and values are {kv_dtype}: Triton's kernels take q's {q_dtype}, {E4M3} or int8 entries"
    if kv_dtype == torch.int8 and plan.heads.head_dim % entry.SCALE_BYTES:
        return f"head_dim {plan.heads.head_dim} is not a multiple of {entry.SCALE_BYTES}, as scales must lie"
    if plan.heads.value_dim:
        return f"values have {plan.heads.value_dim} dimensions and keys {plan.heads.head_dim}"
    if plan.heads.head_dim > MAX_HEAD_DIM:
        return f"head_dim {plan.heads.head_dim} is more than {MAX_HEAD_DIM}"
    if plan.heads.group > LARGE_ROWS:
        return f"{plan.heads.group} query heads share a KV head, more than the {LARGE_ROWS} rows of a tile"
    return None


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
    """See op.py."""
    work, heads, lowered = plan.work, plan.heads, hooks.of(variant)
    if work.n_small:
        rows = max(16, work.small_rows)
        constants = _constants(plan, variant, q, k, rows, lse)
        shared = _arguments(q, k, v, plan, variant, out, lse, scales)
        kernels.small[(work.n_ctas,)](work.small, work.queue, *shared, **constants)
    if work.n_large:
        run_large(q, k, v, plan, variant, out, lse, scales)
    if work.n_merges:
        kernels.merge[(work.n_merges, heads.group)](
            work.merges, work.parts, work.partial_out, work.partial_lse, out, out if lse is None else lse,
            heads.n_kv_heads, lowered.params, GROUP=heads.group, D=heads.head_dim, BLOCK_D=_padded(heads.head_dim),
            SOFTMAX=variant.softmax, HAS_LSE=lse is not None, num_warps=4, **lowered.merging(),
        )  # fmt: skip


def run_large(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: AttnPlan,
    variant: Variant,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    scales: entry.Scales = entry.UNIT,
) -> None:
    """The large lines of a plan alone, which has some: final rows, and parts that are still to be merged."""
    rows = _large_rows(q.element_size())
    chunks = LARGE_ROWS // rows
    constants = _constants(plan, variant, q, k, rows, lse) | {"CHUNKS": chunks}
    shared = _arguments(q, k, v, plan, variant, out, lse, scales)
    kernels.large[(plan.work.n_large * plan.heads.n_kv_heads * chunks,)](plan.work.large, *shared, **constants)


def _arguments(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: AttnPlan,
    variant: Variant,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    scales: entry.Scales,
) -> tuple[Any, ...]:
    """What the kernels for small and large lines have in common, in order."""
    work = plan.work
    pages = work.rows if plan.page_table is None else plan.page_table
    strides = [stride for x in (k, v) for stride in _strides(x, plan.layout)]
    factors = [x.view(torch.float32) for x in (k, v)] if k.dtype == torch.int8 else scales
    return (
        q, k, v, out, out if lse is None else lse, work.rows, pages, work.blocks, work.partial_out, work.partial_lse,
        q.stride(0), q.stride(1), *strides, plan.heads.n_kv_heads, variant.scale, *factors, variant.window,
        variant.n_first, hooks.of(variant).params,
    )  # fmt: skip


def _strides(x: torch.Tensor, layout: Layout) -> tuple[int, int, int]:
    """Of pages (none in RAGGED), heads and tokens."""
    return (0, x.stride(1), x.stride(0)) if layout is Layout.RAGGED else (x.stride(0), x.stride(1), x.stride(2))


def _constants(
    plan: AttnPlan, variant: Variant, q: torch.Tensor, k: torch.Tensor, rows: int, lse: torch.Tensor | None
) -> dict[str, Any]:
    """What is compiled in."""
    head_dim, program = plan.heads.head_dim, variant.program
    transformed = "key_transform" in program.hooks or "value_transform" in program.hooks
    keys, warps, stages = blocking(rows, _padded(head_dim) * q.element_size(), transformed)
    stages = _stages(stages, rows, plan.layout)
    if transformed and k.dtype == torch.int8:
        stages = 1  # Triton 3.6 compiles more wrongly: a line whose keys are one block gets other keys' values
    return {
        "LAYOUT": int(plan.layout),
        "PAGE": plan.page_size,
        "GROUP": plan.heads.group,
        "D": head_dim,
        "CODED": KINDS.get(k.dtype, 0),
        "BLOCK_D": _padded(head_dim),
        "BLOCK_M": rows,
        "BLOCK_N": keys,
        "CAUSAL": program.causal,
        "WINDOWED": program.windowed,
        "SOFTMAX": program.softmax,
        "FAST": program.softmax and variant.scale > 0 and "logits_transform" not in program.hooks,
        "HAS_LSE": lse is not None,
        "num_warps": warps,
        "num_stages": stages,
        **hooks.of(variant).functions,
    }


def _padded(head_dim: int) -> int:
    return max(16, int(triton.next_power_of_2(head_dim)))


def _large_rows(item_bytes: int) -> int:
    """Packed rows that one program takes of a large line: float32 has no tensor cores and long compilations."""
    return LARGE_ROWS if item_bytes <= 2 else 32


def blocking(n_rows: int, row_bytes: int, transformed: bool = False) -> tuple[int, int, int]:
    """(keys of a block, warps, pipeline stages) for n_rows packed rows of row_bytes; transformed: key or value hooks.

    Large lines: measured on an H200 at 256 bytes a row (docs/lab-notes.md, "Blocks of the first attention kernel").
    Small lines are bound by memory and a CTA has its multiprocessor to itself, so the pipeline must hold enough keys
    in flight: reading through the page table takes two loads, so s stages are (s - 1) // 2 key blocks; see `_stages`.
    """
    narrow = row_bytes <= 256
    if n_rows >= LARGE_ROWS:
        return (128 if narrow and not transformed else 64 if narrow else 32), 8, 2 if narrow or transformed else 3
    if row_bytes > 512:
        return 16 if transformed else 32, 4, 3
    if transformed:
        return 64 if narrow else 32, 4, 4
    if n_rows <= 32:
        return (128, 4, 7) if narrow else (32, 4, 9)
    return (64, 4, 7) if narrow else (32, 4, 5)


def _stages(stages: int, n_rows: int, layout: Layout) -> int:
    """As many key blocks in flight without a page table: there s stages are s - 1 blocks."""
    return (stages + 1) // 2 if layout is Layout.RAGGED and n_rows < LARGE_ROWS else stages
