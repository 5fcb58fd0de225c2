"""Qk-norm, rotary embedding and page writes on CUDA, in one launch: one program a row and group of heads.

A program holds its heads in registers: it reads each element once and writes each once. Queries go to a tensor of their
own, not back to where they came from, so that no thread can read what another has already replaced.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.kvstore import entry

MAX_HEADS = 8
"""Heads of a program: enough for loads of 16 bytes a thread, few enough that one row keeps several processors busy."""
WARP_ELEMENTS = 512


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
    _, n_kv_heads, page_size, d = k_pages.shape
    n, n_q_heads, half = qkv.shape[0], qkv.shape[1] // d - 2 * n_kv_heads, cos_sin.shape[1] // 2
    q = torch.empty((n, n_q_heads, d), dtype=qkv.dtype, device=qkv.device)
    heads = min(MAX_HEADS, triton.next_power_of_2(max(n_q_heads, n_kv_heads)))
    q_groups, kv_groups = triton.cdiv(n_q_heads, heads), triton.cdiv(n_kv_heads, heads)
    if n:
        _rotate_and_store[(n * (q_groups + 2 * kv_groups),)](
            qkv, qkv.stride(0), q, q_norm, k_norm, eps, positions, cos_sin, k_pages, v_pages, cache_locs,
            1 / scales.k, 1 / scales.v, N_Q=n_q_heads, N_KV=n_kv_heads, D=d, HALF=half, PAGE=page_size, HEADS=heads,
            Q_GROUPS=q_groups, KV_GROUPS=kv_groups, CODED=k_pages.dtype == entry.E4M3,
            BLOCK_D=triton.next_power_of_2(d), BLOCK_HALF=triton.next_power_of_2(max(1, half)),
            BLOCK_REST=triton.next_power_of_2(max(1, d - 2 * half)),
            num_warps=max(1, heads * triton.next_power_of_2(d) // WARP_ELEMENTS),
        )  # fmt: skip
    return q


@triton.jit(do_not_specialize=["eps", "k_inverse", "v_inverse"])  # type: ignore[untyped-decorator]
def _rotate_and_store(  # type: ignore[no-untyped-def]
    qkv, qkv_stride, q, q_norm, k_norm, eps, positions, cos_sin, k_pages, v_pages, cache_locs,
    k_inverse, v_inverse,
    N_Q: tl.constexpr, N_KV: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, PAGE: tl.constexpr,
    HEADS: tl.constexpr, Q_GROUPS: tl.constexpr, KV_GROUPS: tl.constexpr, CODED: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    GROUPS: tl.constexpr = Q_GROUPS + 2 * KV_GROUPS
    i, group = (tl.program_id(0) // GROUPS).to(tl.int64), tl.program_id(0) % GROUPS
    row, heads = qkv + i * qkv_stride, tl.arange(0, HEADS)[:, None]
    if group < Q_GROUPS:
        heads += group * HEADS
        _rotate(
            row + heads * D, q + (i * N_Q + heads) * D, heads < N_Q, q_norm, eps, positions + i, cos_sin,
            1.0, False, HEADS, D, HALF, BLOCK_HALF, BLOCK_REST,
        )  # fmt: skip
    else:
        cache_loc = tl.load(cache_locs + i)
        heads += (group - Q_GROUPS) % KV_GROUPS * HEADS
        live, to = heads < N_KV, ((cache_loc // PAGE * N_KV + heads) * PAGE + cache_loc % PAGE) * D
        if group < Q_GROUPS + KV_GROUPS:
            _rotate(
                row + (N_Q + heads) * D, k_pages + to, live, k_norm, eps, positions + i, cos_sin,
                k_inverse, CODED, HEADS, D, HALF, BLOCK_HALF, BLOCK_REST,
            )  # fmt: skip
        else:
            dims = tl.arange(0, BLOCK_D)[None, :]
            inside = live & (dims < D)
            v = tl.load(row + (N_Q + N_KV + heads) * D + dims, mask=inside)
            tl.store(v_pages + to + dims, _entry(v, v_inverse, CODED), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _rotate(  # type: ignore[no-untyped-def]
    source, target, live, weight, eps, position, cos_sin, inverse, CODED: tl.constexpr, HEADS: tl.constexpr,
    D: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    """source, target: [HEADS, 1], where heads start.

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
    first, second = (a * cos - b * sin).to(dtype), (b * cos + a * sin).to(dtype)
    tl.store(target + at, _entry(first, inverse, CODED), mask=live & paired)
    tl.store(target + HALF + at, _entry(second, inverse, CODED), mask=live & paired)
    tl.store(target + rest, _entry(c.to(dtype), inverse, CODED), mask=live & tail)


@triton.jit  # type: ignore[untyped-decorator]
def _entry(x, inverse, CODED: tl.constexpr):  # type: ignore[no-untyped-def]
    """As a page holds it: x, or in e4m3 x times inverse, cut off at its largest number. NaN stays."""
    if CODED:
        wide = x.to(tl.float32) * inverse
        wide = tl.where(wide > 448.0, 448.0, tl.where(wide < -448.0, -448.0, wide))
        return wide.to(tl.float8e4nv)
    else:
        return x


@triton.jit  # type: ignore[untyped-decorator]
def _scale(x, factor, weight, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rounds where norm/triton.py does: after the norm, and after the weight."""
    normed = (x * factor).to(dtype)
    return (normed.to(tl.float32) * weight.to(tl.float32)).to(dtype).to(tl.float32)
