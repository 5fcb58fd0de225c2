"""Public attention: plan once a step, run once a layer. Checks what it is given; selection.py says what runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from quire.core.errors import ConfigError
from quire.kernels.attention import bounds, selection
from quire.kernels.attention import trees as tree_plans
from quire.kernels.attention.cpu import work as cpu_work
from quire.kernels.attention.schedule import work as cuda_work
from quire.kernels.attention.schedule.plan import (
    AttnPlan,
    AttnSpans,
    Heads,
    Layout,
    Mirrored,
    PlanBuffers,
    SharedPrefix,
    Trees,
)
from quire.kernels.attention.variant import Variant
from quire.kernels.e4m3 import E4M3
from quire.kernels.kvstore import entry

MAX_GROUP = 128
"""Query heads of one KV head: the rows of the largest tile."""
WORK: Mapping[str, Callable[[AttnPlan, torch.device], object]] = {"cpu": cpu_work.make, "cuda": cuda_work.make}
"""Device type → what turns a plan into the device's list of work."""


def plan(
    q_indptr: np.ndarray,
    kv_lens: np.ndarray,
    slots: np.ndarray,
    page_table: torch.Tensor,
    *,
    page_size: int,
    n_q_heads: int,
    n_kv_heads: int,
    head_dim: int,
    variant: Variant | None = None,
    shared: Sequence[SharedPrefix] = (),
    blocks: tuple[np.ndarray, np.ndarray] | None = None,
    buffers: PlanBuffers | None = None,
    batch_invariant: bool = False,
    settled: bool = False,
    few: np.ndarray | None = None,
    trees: Trees | None = None,
    value_dim: int = 0,
) -> AttnPlan:
    """Prepare attention over pages for the spans of one step, for all layers: prefill, append and decode in any mix.

    q_indptr: int32 [n_spans + 1], rows of each span in the flat batch (empty spans allowed). kv_lens: int32 [n_spans],
    tokens of the sequence up to and with the span's last row. slots: int32 [n_spans], rows of page_table. page_table:
    int32 [n_slots, max_pages], contiguous, on the device where `run` executes: entry [slot, i] is the page of positions
    i * page_size on. Its values are not checked: like any index on a device, a page that k does not have is read.
    variant: the plan covers what this variant sees; None: plain causal attention, which serves every causal variant.
    shared: groups of spans whose first keys lie in the same pages; they are read once where that pays.
    blocks: (indptr [n_spans + 1], indices), block-sparse attention: each span reads only these logical pages (position
    // page_size), ascending. Spans may be row blocks of one sequence: give its slot to each of them.
    buffers: from `plan_buffers`, to keep all addresses and grids of the step fixed; they hold one plan at a time.
    batch_invariant: results of a span do not depend on its neighbours, at some cost in balance.
    few: bool [n_spans], spans of few enough rows for the kernel of decode steps, which computes these; the one for many
    rows computes the others, also where they are short. None: by their rows. A row's bits differ between both.
    trees: some spans are trees of tokens; for variants without transforms of queries, keys or values, and on CUDA for
    those that see no positions.
    settled: what is launched between the plan and `run` stores no keys below a span's first row, so that `run` may read
    those before these kernels have ended.
    value_dim: dimensions of a value; 0: head_dim.
    Raises ValueError on a mismatch.
    """
    if blocks is not None and len(blocks) != 2:
        raise ValueError(f"blocks is a pair (indptr, indices), not {len(blocks)} values")
    indptr, listed = map(_int32, blocks) if blocks is not None else (None, None)
    spans = AttnSpans(_int32(q_indptr), _int32(kv_lens), _int32(slots), indptr, listed, trees)
    seen = variant or Variant(1.0)
    bare = AttnPlan(
        Layout.PAGED if blocks is None else Layout.SPARSE,
        Heads(n_q_heads, n_kv_heads, head_dim, value_dim),
        page_size,
        spans,
        page_table,
        seen.causal,
        seen.window,
        seen.n_first,
        shared,
        batch_invariant,
        few,
        settled,
    )
    _check_spans(bare)
    _check_pages(bare, page_table)
    _check_shared(bare)
    tree_plans.check(bare)
    return _with_work(bare, buffers)


def plan_ragged(
    q_indptr: np.ndarray,
    kv_indptr: np.ndarray,
    *,
    n_q_heads: int,
    n_kv_heads: int,
    head_dim: int,
    device: torch.device,
    variant: Variant | None = None,
    batch_invariant: bool = False,
    value_dim: int = 0,
) -> AttnPlan:
    """Prepare attention over keys and values that lie in consecutive rows: k, v [n_keys, n_kv_heads, head_dim].

    kv_indptr: int32 [n_spans + 1], keys of span s are rows kv_indptr[s] .. kv_indptr[s + 1] - 1; its rows of q are the
    last tokens of that sequence. The rest as in `plan`. Raises ValueError on a mismatch.
    """
    bounds = _int32(kv_indptr)
    seen = variant or Variant(1.0)
    spans = AttnSpans(_int32(q_indptr), np.diff(bounds), bounds[:-1].copy())
    heads = Heads(n_q_heads, n_kv_heads, head_dim, value_dim)
    bare = AttnPlan(Layout.RAGGED, heads, 1, spans, None, seen.causal, seen.window, seen.n_first)
    _check_spans(bare)
    return _with_work(dataclasses.replace(bare, batch_invariant=batch_invariant), None, device)


def plan_buffers(
    like: AttnPlan,
    max_spans: int,
    *,
    span_tokens: int = 0,
    max_large: int = 0,
    max_rows: int = 0,
    max_blocks: int = 0,
    max_keys: int = 1 << 20,
    memory: Mirrored | None = None,
) -> PlanBuffers:
    """Buffers for steps with the layout, heads, page size, mode and device of `like`: `max_spans` spans of few rows.

    span_tokens: most rows of a span; 0: all that fit a small tile. max_large: tiles of 128 packed rows that also fit
    (longer spans, shared prefixes). max_rows: rows of q of a step, 0: as many as these hold. max_blocks: entries of all
    lists of `blocks`. max_keys: of all small spans together, in the batch-invariant mode. memory: device memory for the
    lists, which the caller sends there from its host side. A CUDA graph captured around `run` with a plan from these
    buffers serves every later plan that was written into them before the replay.
    Raises ValueError for a plan on another device than CUDA, or over ragged rows.
    """
    device = "none" if like.page_table is None else like.page_table.device.type
    if device != "cuda":
        raise ValueError(f"plan_buffers takes a plan over pages on a CUDA device; the device of its pages: {device}")
    return cuda_work.Buffers(
        like,
        max_spans,
        max_large,
        span_tokens=span_tokens,
        max_rows=max_rows,
        max_keys=max_keys,
        max_blocks=max_blocks,
        memory=memory,
    )


def run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: AttnPlan,
    variant: Variant,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    scales: entry.Scales = entry.UNIT,
) -> torch.Tensor:
    """Attention of each row of q to the keys of its own sequence that the variant shows to it.

    q: [n, n_q_heads, head_dim], n >= q_indptr[-1], last dimension contiguous; rows beyond q_indptr[-1] are padding.
    k, v: pages [n_pages, n_kv_heads, page_size, head_dim] or ragged rows [n_keys, n_kv_heads, head_dim], any strides
    with a contiguous last dimension, q's dtype or float8_e4m3fn, this step's keys and values already stored; scales: of
    the latter, number = code * scale. Also int8 entries, with a last dimension of head_dim + 4 (kvstore.entry).
    v may be a view of k's memory, with value_dim numbers. out: like q with value_dim numbers, contiguous, or None to
    allocate. lse: float32 [n, n_q_heads], contiguous, receives the natural logarithm of each row's sum of weights (-inf
    where nothing is seen), or None.
    Returns out; its padding rows hold anything. Row i of span s stands at position kv_lens[s] - (q_indptr[s + 1] - i).
    Runs of one plan share its memory for partial results: keep them on one stream, on CUDA the current device's.
    Raises ValueError on a mismatch, ConfigError when no implementation can run it.
    """
    _check_run(q, k, v, plan, variant)
    if plan.spans.trees is not None and q.device.type != "cpu":
        variant = tree_plans.masked(variant, plan, q.device)
    bounds.check(variant, plan)
    if out is None:
        out = torch.empty((*q.shape[:2], plan.heads.out_dim), dtype=q.dtype, device=q.device)
    elif (
        out.shape != (*q.shape[:2], plan.heads.out_dim)
        or out.dtype != q.dtype
        or out.device != q.device
        or not out.is_contiguous()
    ):
        raise ValueError(
            f"out {tuple(out.shape)} {out.dtype} on {out.device} must be contiguous and like q {tuple(q.shape)} "
            f"{q.dtype} on {q.device}, with {plan.heads.out_dim} dimensions"
        )
    if lse is not None:
        _check_lse(lse, q, variant)
    more = (scales,) if k.dtype == E4M3 and q.dtype != k.dtype else ()
    selection.choose(plan, variant, q.device, q.dtype, k.dtype)(q, k, v, plan, variant, out, lse, *more)
    return out


def _with_work(bare: AttnPlan, buffers: PlanBuffers | None, device: torch.device | None = None) -> AttnPlan:
    if buffers is not None:
        return dataclasses.replace(bare, work=buffers.fill(bare))
    if bare.page_table is not None:
        place = bare.page_table.device
    elif device is not None:
        place = torch.device(device)
    else:
        raise ValueError("a plan over rows of keys needs the device that they are on")
    if place.type not in WORK:
        raise ConfigError(f"attention has no kernel for device {place.type!r}: use 'cpu' or 'cuda'")
    return dataclasses.replace(bare, work=WORK[place.type](bare, place))


def _int32(values: np.ndarray) -> np.ndarray:
    """As contiguous int32. Raises ValueError for other than whole numbers of 31 bits."""
    array = np.asarray(values)
    if array.dtype == np.int32 and array.flags.c_contiguous:
        return array
    if array.size and (array.dtype.kind not in "iu" or array.max() >= 1 << 31 or array.min() < -(1 << 31)):
        raise ValueError(
            f"{array.dtype} values up to {array.max()} given where int32 is wanted (indptr, lengths, slots)"
        )
    return np.ascontiguousarray(array, np.int32)


def _check_spans(plan: AttnPlan) -> None:
    spans, heads = plan.spans, plan.heads
    if not len(spans.q_indptr) == len(spans.kv_lens) + 1 == len(spans.kv_at) + 1 or spans.q_indptr[0] != 0:
        raise ValueError(
            f"q_indptr has {len(spans.q_indptr)} entries for {len(spans.kv_lens)} lengths and {len(spans.kv_at)} slots"
        )
    wrong = np.flatnonzero((spans.lengths < 0) | (spans.kv_lens < 0))
    if len(wrong):
        n_rows, n_keys = spans.lengths[wrong[0]], spans.kv_lens[wrong[0]]
        raise ValueError(f"span {wrong[0]} has {n_rows} rows and {n_keys} keys: q_indptr and kv_indptr must not fall")
    wrong = np.flatnonzero(spans.kv_lens < spans.lengths) if plan.causal else wrong
    if len(wrong):
        n_rows, n_keys = spans.lengths[wrong[0]], spans.kv_lens[wrong[0]]
        raise ValueError(f"causal span {wrong[0]} has {n_rows} rows but {n_keys} keys: its rows' keys count, too")
    if heads.head_dim < 1:
        raise ValueError(f"head_dim {heads.head_dim} must be at least 1")
    if heads.n_kv_heads < 1 or heads.n_q_heads % heads.n_kv_heads or not 1 <= heads.group <= MAX_GROUP:
        raise ValueError(
            f"{heads.n_q_heads} query heads for {heads.n_kv_heads} KV heads: must be a multiple, at most {MAX_GROUP} x"
        )


def _check_pages(plan: AttnPlan, page_table: torch.Tensor) -> None:
    if not isinstance(page_table, torch.Tensor):
        raise ValueError(
            f"page_table is a {type(page_table).__name__}: give an int32 torch tensor [n_slots, max_pages]"
        )
    if page_table.dtype != torch.int32 or page_table.dim() != 2 or not page_table.is_contiguous():
        raise ValueError(
            f"page_table must be contiguous int32 [n_slots, max_pages], not {page_table.dtype} "
            f"{tuple(page_table.shape)} with strides {page_table.stride()}"
        )
    if page_table.numel() >= 1 << 31:
        raise ValueError(f"page_table has {page_table.numel()} entries: indices have 32 bits; use larger pages")
    if plan.page_size < 1:
        raise ValueError(f"page_size {plan.page_size} must be at least 1")
    longest, slots = int(plan.spans.kv_lens.max(initial=0)), plan.spans.kv_at
    if longest > page_table.shape[1] * plan.page_size:
        raise ValueError(f"{longest} tokens do not fit {page_table.shape[1]} pages of {plan.page_size} tokens")
    if len(slots) and not 0 <= int(slots.min()) <= int(slots.max()) < page_table.shape[0]:
        raise ValueError(f"slots {slots.min()} .. {slots.max()} leave the page table of {page_table.shape[0]} rows")
    if plan.layout is Layout.SPARSE:
        _check_blocks(plan)


def _check_blocks(plan: AttnPlan) -> None:
    indptr, blocks = plan.spans.listed
    if len(indptr) != len(plan.spans.kv_lens) + 1 or indptr[0] != 0 or indptr[-1] != len(blocks):
        raise ValueError(f"blocks: indptr has {len(indptr)} entries up to {indptr[-1]} for {len(blocks)} indices")
    counts = np.diff(indptr)
    if (counts < 0).any():
        raise ValueError("blocks: indptr must not fall")
    owner = np.repeat(np.arange(len(counts)), counts)
    if len(blocks) and ((blocks < 0).any() or (blocks >= -(-plan.spans.kv_lens // plan.page_size)[owner]).any()):
        raise ValueError(f"blocks: an index lies outside 0 .. (kv_len - 1) // {plan.page_size} of its span")
    if ((np.diff(blocks) <= 0) & (np.diff(owner) == 0)).any():
        raise ValueError("blocks: the indices of a span must ascend")


def _check_shared(plan: AttnPlan) -> None:
    if not plan.shared:
        return
    members = np.concatenate([np.asarray(group.spans, np.int64) for group in plan.shared])
    n_keys = np.repeat([group.n_keys for group in plan.shared], [len(group.spans) for group in plan.shared])
    outside = members[(members < 0) | (members >= len(plan.spans.kv_lens))]
    if len(outside):
        raise ValueError(f"a shared prefix names span {outside[0]}, the plan has {len(plan.spans.kv_lens)}")
    times = np.bincount(members, minlength=1)
    if times.max() > 1:
        raise ValueError(f"span {times.argmax()} has {times.max()} shared prefixes: name each span once")
    wrong = n_keys[(n_keys < 0) | (n_keys % plan.page_size != 0)]
    if len(wrong):
        raise ValueError(f"a shared prefix has {wrong[0]} keys: give whole pages of {plan.page_size}")
    starts = (plan.spans.kv_lens - plan.spans.lengths)[members]
    wrong = np.flatnonzero(starts < n_keys)
    if len(wrong):
        raise ValueError(
            f"span {members[wrong[0]]} begins at position {starts[wrong[0]]}, inside its shared prefix of "
            f"{n_keys[wrong[0]]} keys: share at most {starts[wrong[0]]}"
        )


def _check_run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: AttnPlan, variant: Variant) -> None:
    tensor = torch.Tensor
    for name, value, kind in (
        ("q", q, tensor), ("k", k, tensor), ("v", v, tensor), ("plan", plan, AttnPlan), ("variant", variant, Variant)
    ):  # fmt: skip
        if not isinstance(value, kind):
            raise ValueError(f"{name} is a {type(value).__name__}, not a {kind.__name__}: run(q, k, v, plan, variant)")
    if q.requires_grad and torch.is_grad_enabled():
        raise ValueError("run() has no gradient: use quire.kernels.flash.flash_attention, or torch.no_grad()")
    if not q.dtype.is_floating_point:
        raise ValueError(f"q is {q.dtype}: attention takes floating-point types")
    heads = plan.heads
    size = entry.entry_size(heads.head_dim, k.dtype)
    if plan.layout is Layout.RAGGED:
        axes = "n_keys, n_kv_heads, head_dim"
        wanted: tuple[int, ...] = (heads.n_kv_heads, size)
        n_keys = int((plan.spans.kv_at + plan.spans.kv_lens).max(initial=0))
        if k.shape[0] < n_keys:
            raise ValueError(f"k has {k.shape[0]} rows, but kv_indptr of the plan reaches {n_keys}")
    else:
        axes = "n_pages, n_kv_heads, page_size, head_dim"
        wanted = (heads.n_kv_heads, plan.page_size, size)
    of_values = (*k.shape[:-1], entry.entry_size(heads.out_dim, v.dtype))
    if tuple(k.shape[1:]) != wanted or v.shape != of_values:
        raise ValueError(
            f"k {tuple(k.shape)} and v {tuple(v.shape)} must be [{axes}] ending in {wanted}, values in "
            f"{of_values[-1]}, as planned: transpose other orders (views will do)"
        )
    if q.shape[1:] != (heads.n_q_heads, heads.head_dim) or q.shape[0] < plan.n_rows:
        raise ValueError(f"q {tuple(q.shape)} does not fit a plan of {plan.n_rows} rows, {heads}")
    _check_devices(q, k, v, plan, variant)
    if q.stride(2) != 1 or k.stride(-1) != 1 or v.stride(-1) != 1:
        raise ValueError("the last dimension of q, k and v must be contiguous")
    if k.dtype != v.dtype or k.dtype not in (q.dtype, torch.float8_e4m3fn, torch.int8):
        raise ValueError(
            f"q is {q.dtype} but k, v are {k.dtype}, {v.dtype}: use q's dtype, float8_e4m3fn or int8 entries for both"
        )
    if plan.causal and not variant.causal:
        raise ValueError("the variant is not causal but the plan is: give the variant to plan()")
    obstacle = "" if plan.spans.trees is None else tree_plans.obstacle(variant, q.device)
    if obstacle:
        raise ValueError(f"a variant cannot run the trees of the plan: {obstacle}")
    if plan.window and not (0 < variant.window <= plan.window and variant.n_first <= plan.n_first):
        raise ValueError(
            f"the plan covers a window of {plan.window} and {plan.n_first} first keys, the variant sees "
            f"{variant.window or 'all'} and {variant.n_first}: give the widest variant to plan()"
        )


def _check_devices(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: AttnPlan, variant: Variant) -> None:
    if not q.device == k.device == v.device:
        raise ValueError(f"q, k and v are on {q.device}, {k.device} and {v.device}: use one device")
    if plan.page_table is not None and plan.page_table.device != q.device:
        raise ValueError(f"the plan's page_table is on {plan.page_table.device} and q on {q.device}: use one device")
    for name, tensor in variant.tensors.items():
        if tensor.device != q.device:
            raise ValueError(f"parameter {name!r} of the variant is on {tensor.device} and q on {q.device}: move it")


def _check_lse(lse: torch.Tensor, q: torch.Tensor, variant: Variant) -> None:
    if not variant.softmax:
        raise ValueError("a variant without softmax has no lse: pass lse=None")
    if lse.shape != q.shape[:2] or lse.dtype != torch.float32 or lse.device != q.device or not lse.is_contiguous():
        raise ValueError(
            f"lse {tuple(lse.shape)} {lse.dtype} on {lse.device} must be contiguous float32 {tuple(q.shape[:2])} "
            f"on {q.device}"
        )
