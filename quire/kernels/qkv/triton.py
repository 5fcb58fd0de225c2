"""Qk-norm, rotary embedding and page writes on CUDA, in one launch: one program a row and group of heads.

A program holds its heads in registers: it reads each element once and writes each once. Queries go to a tensor of their
own, not back to where they came from, so that no thread can read what another has already replaced.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels import e4m3
from quire.kernels.kvstore import entry
from quire.kernels.qgemm.reference import SMALLEST as LEAST

MAX_HEADS = 8
"""Heads of a program: enough for loads of 16 bytes a thread, few enough that one row keeps several processors busy."""
WARP_ELEMENTS = 512
PLAIN, E4M3, INT8 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
KINDS = {e4m3.E4M3: E4M3.value, torch.int8: INT8.value}
"""Of entries (`kernels.kvstore.entry`)."""
SMALLEST, LARGEST = tl.constexpr(LEAST), tl.constexpr(e4m3.E4M3_MAX)
ROUNDER = tl.constexpr(1.5 * 2**23)
"""Added to a float32 below 2^22 and taken away again, it leaves the nearest integer, half to even."""


def obstacle(
    qkv: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    cache_locs: torch.Tensor,
    scales: entry.Scales = entry.UNIT,
) -> str | None:
    """Why this kernel does not run on these arguments, or None."""
    if k_pages.dtype == torch.int8 and k_pages.shape[-1] % entry.SCALE_BYTES:
        return f"head_dim {entry.head_dim_of(k_pages)} is not a multiple of {entry.SCALE_BYTES}, as scales must lie"
    return None


def rotate_and_store(
    qkv: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    cache_locs: torch.Tensor,
    scales: entry.Scales = entry.UNIT,
) -> torch.Tensor:
    """See op.py. qkv stays as it is, q is contiguous."""
    _, n_kv_heads, page_size, _ = k_pages.shape
    d, kind = entry.head_dim_of(k_pages), KINDS.get(k_pages.dtype, PLAIN.value)
    of_k: float | torch.Tensor = 1 / scales.k
    of_v: float | torch.Tensor = 1 / scales.v
    if kind == INT8.value:  # the same memory, for the scale behind each entry
        of_k, of_v = k_pages.view(torch.float32), v_pages.view(torch.float32)
    n, n_q_heads, half = qkv.shape[0], qkv.shape[1] // d - 2 * n_kv_heads, cos_sin.shape[1] // 2
    q = torch.empty((n, n_q_heads, d), dtype=qkv.dtype, device=qkv.device)
    heads = min(MAX_HEADS, triton.next_power_of_2(max(n_q_heads, n_kv_heads)))
    q_groups, kv_groups = triton.cdiv(n_q_heads, heads), triton.cdiv(n_kv_heads, heads)
    if n:
        _rotate_and_store[(n * (q_groups + 2 * kv_groups),)](
            qkv, qkv.stride(0), q, q_norm, k_norm, eps, positions, cos_sin, k_pages, v_pages, cache_locs,
            of_k, of_v, N_Q=n_q_heads, N_KV=n_kv_heads, D=d, HALF=half, PAGE=page_size, HEADS=heads,
            Q_GROUPS=q_groups, KV_GROUPS=kv_groups, KIND=kind,
            BLOCK_D=triton.next_power_of_2(d), BLOCK_HALF=triton.next_power_of_2(max(1, half)),
            BLOCK_REST=triton.next_power_of_2(max(1, d - 2 * half)),
            num_warps=max(1, heads * triton.next_power_of_2(d) // WARP_ELEMENTS),
        )  # fmt: skip
    return q


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["eps", "of_k", "of_v"], do_not_specialize_on_alignment=["positions", "cache_locs"]
)
def _rotate_and_store(  # type: ignore[no-untyped-def]
    qkv, qkv_stride, q, q_norm, k_norm, eps, positions, cos_sin, k_pages, v_pages, cache_locs,
    of_k, of_v,
    N_Q: tl.constexpr, N_KV: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, PAGE: tl.constexpr,
    HEADS: tl.constexpr, Q_GROUPS: tl.constexpr, KV_GROUPS: tl.constexpr, KIND: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    GROUPS: tl.constexpr = Q_GROUPS + 2 * KV_GROUPS
    i, group = (tl.program_id(0) // GROUPS).to(tl.int64), tl.program_id(0) % GROUPS
    row, heads = qkv + i * qkv_stride, tl.arange(0, HEADS)[:, None]
    if group < Q_GROUPS:
        heads += group * HEADS
        _rotate(
            row + heads * D, q + (i * N_Q + heads) * D, heads < N_Q, q_norm, eps, positions + i, cos_sin,
            1.0, PLAIN, HEADS, D, HALF, BLOCK_HALF, BLOCK_REST,
        )  # fmt: skip
    else:
        cache_loc = tl.load(cache_locs + i)
        heads += (group - Q_GROUPS) % KV_GROUPS * HEADS
        SIZE: tl.constexpr = D + 4 if KIND == INT8 else D
        live, to = heads < N_KV, ((cache_loc // PAGE * N_KV + heads) * PAGE + cache_loc % PAGE) * SIZE
        if KIND == INT8:
            of_key, of_value = of_k + (to + D) // 4, of_v + (to + D) // 4
        else:
            of_key, of_value = of_k, of_v
        if group < Q_GROUPS + KV_GROUPS:
            _rotate(
                row + (N_Q + heads) * D, k_pages + to, live, k_norm, eps, positions + i, cos_sin,
                of_key, KIND, HEADS, D, HALF, BLOCK_HALF, BLOCK_REST,
            )  # fmt: skip
        else:
            dims = tl.arange(0, BLOCK_D)[None, :]
            inside = live & (dims < D)
            v = tl.load(row + (N_Q + N_KV + heads) * D + dims, mask=inside, other=0.0)
            if KIND == INT8:
                tl.store(v_pages + to + dims, _entry(v, _factor(_largest(v), of_value, live), KIND), mask=inside)
            else:
                tl.store(v_pages + to + dims, _entry(v, of_value, KIND), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _rotate(  # type: ignore[no-untyped-def]
    source, target, live, weight, eps, position, cos_sin, of_entry, KIND: tl.constexpr, HEADS: tl.constexpr,
    D: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    """source, target: [HEADS, 1], where heads start. of_entry: of e4m3 the inverse of the scale, of int8 [HEADS, 1],
    where scales go.

    The loads that wait for nothing come first, so that latencies overlap. Each thread loads the cosines and weights of
    its own values, for all heads again: these come from the L1 cache, and nothing passes through shared memory.
    """
    at = tl.broadcast_to(tl.arange(0, BLOCK_HALF)[None, :], (HEADS, BLOCK_HALF))
    rest = tl.broadcast_to(2 * HALF + tl.arange(0, BLOCK_REST)[None, :], (HEADS, BLOCK_REST))
    paired, tail = at < HALF, rest < D
    dtype = source.dtype.element_ty
    a = tl.load(source + at, mask=live & paired, other=0.0).to(tl.float32)
    b = tl.load(source + HALF + at, mask=live & paired, other=0.0).to(tl.float32)
    c = tl.load(source + rest, mask=live & tail, other=0.0).to(tl.float32)
    table = cos_sin + tl.load(position).to(tl.int64) * (2 * HALF)
    cos = tl.load(table + at, mask=paired, other=0.0)
    sin = tl.load(table + HALF + at, mask=paired, other=0.0)
    if weight is not None:
        a_weight = tl.load(weight + at, mask=paired, other=0.0)
        b_weight = tl.load(weight + HALF + at, mask=paired, other=0.0)
        c_weight = tl.load(weight + rest, mask=tail, other=0.0)
        squares = tl.sum(a * a + b * b, 1)
        if D > 2 * HALF:
            squares += tl.sum(c * c, 1)
        factor = (1.0 / tl.sqrt(squares / D + eps))[:, None]
        a = _scale(a, factor, a_weight, dtype)
        b = _scale(b, factor, b_weight, dtype)
        c = _scale(c, factor, c_weight, dtype)
    first, second, third = (a * cos - b * sin).to(dtype), (b * cos + a * sin).to(dtype), c.to(dtype)
    if KIND == INT8:
        largest = tl.maximum(_largest(first), _largest(second), propagate_nan=tl.PropagateNan.ALL)
        largest = tl.maximum(largest, _largest(third), propagate_nan=tl.PropagateNan.ALL)
        of_entry = _factor(largest, of_entry, live)
    tl.store(target + at, _entry(first, of_entry, KIND), mask=live & paired)
    tl.store(target + HALF + at, _entry(second, of_entry, KIND), mask=live & paired)
    tl.store(target + rest, _entry(third, of_entry, KIND), mask=live & tail)


@triton.jit
def _largest(x):  # type: ignore[no-untyped-def]
    """[HEADS, 1], the largest magnitude of each row of x; NaN where there is an infinity or a NaN."""
    wide = x.to(tl.float32)
    return (tl.max(tl.abs(wide), 1) + tl.sum(wide * 0.0, 1))[:, None]


@triton.jit
def _factor(largest, scales, live):  # type: ignore[no-untyped-def]
    """Stores the scale of each head; what its numbers are multiplied by. See `qgemm.reference.quantized_rows`."""
    rounds = largest >= SMALLEST
    scale = tl.where(rounds, tl.div_rn(largest, tl.full(largest.shape, 127.0, tl.float32)), largest * 0.0)
    tl.store(scales, scale, mask=live)
    whole = tl.full(largest.shape, 127.0, tl.float32)
    return tl.where(rounds, tl.div_rn(whole, tl.where(rounds, largest, 1.0)), 0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _entry(x, factor, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """As a page holds it: x, or x times factor: in e4m3, cut off at its largest number, where NaN stays; as integers, 0
    where the factor is."""
    if KIND == E4M3:
        wide = x.to(tl.float32) * factor
        wide = tl.where(wide > LARGEST, LARGEST, tl.where(wide < -LARGEST, -LARGEST, wide))
        return wide.to(tl.float8e4nv)
    elif KIND == INT8:
        wide = tl.where(factor > 0.0, x.to(tl.float32) * factor, 0.0)
        return ((wide + ROUNDER) - ROUNDER).to(tl.int8)
    else:
        return x


@triton.jit  # type: ignore[untyped-decorator]
def _scale(x, factor, weight, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rounds where norm/triton.py does: after the norm, and after the weight."""
    normed = (x * factor).to(dtype)
    return (normed.to(tl.float32) * weight.to(tl.float32)).to(dtype).to(tl.float32)
