"""The kernels of `triton` around the products: the choice of experts, places of assignments, the sum of outputs."""

from __future__ import annotations

import triton
import triton.language as tl

LARGEST = tl.constexpr(3.4028234663852886e38)


@triton.jit  # type: ignore[untyped-decorator]
def route(  # type: ignore[no-untyped-def]
    logits, stride, correction, load, expert_ids, weights, scale, margin,
    E: tl.constexpr, E_PAD: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr, SIGMOID: tl.constexpr,
    MIXER: tl.constexpr, EVEN: tl.constexpr, RENORMALISE: tl.constexpr, G: tl.constexpr,
    G_PAD: tl.constexpr, G_CHOSEN: tl.constexpr, G_BEST: tl.constexpr,
):  # fmt: skip
    """One program a token."""
    row = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, E_PAD)
    place = tl.arange(0, K_PAD)
    if EVEN:
        taken = (row * K + place) % E
        tl.store(expert_ids + row * K + place, taken.to(tl.int32), mask=place < K)
        if load is not None:
            tl.atomic_add(load + taken, 1, mask=place < K, sem="relaxed")
        tl.store(weights + row * K + place, tl.full([K_PAD], 1.0 / K, tl.float32) * scale, mask=place < K)
        return
    x = tl.load(logits + row * stride + e, mask=e < E, other=0.0)
    x = tl.where(x == x, tl.minimum(tl.maximum(x, -LARGEST), LARGEST), -LARGEST)
    x = tl.where(e < E, x, float("-inf"))
    if MIXER:
        scores = x
    elif SIGMOID:
        scores = tl.where(e < E, 1.0 / (1.0 + tl.exp(-x)), 0.0)
    else:
        powers = tl.exp(x - tl.max(x, 0))
        scores = powers / tl.sum(powers, 0)
    choice = scores
    if correction is not None:
        choice += tl.load(correction + e, mask=e < E, other=0.0)
    choice = tl.where(e < E, choice, float("-inf"))
    if G > 1:
        choice = _of_best_groups(choice, e, E, G, G_PAD, G_CHOSEN, G_BEST)
    ids, found = tl.zeros([K_PAD], tl.int32), tl.zeros([K_PAD], tl.float32)
    for j in range(K):
        best = tl.argmax(choice, 0)
        if MIXER:
            top = tl.max(choice, 0)
            near = (top - x) / tl.maximum(tl.abs(x), top) > margin
            weight = 1.0 / tl.sum(tl.where(near, 0.0, tl.exp(choice - top)), 0)
        else:
            weight = tl.sum(tl.where(e == best, scores, 0.0), 0)
        ids = tl.where(place == j, best, ids)
        found = tl.where(place == j, weight, found)
        choice = tl.where(e == best, float("-inf"), choice)
    if load is not None:
        tl.atomic_add(load + ids, 1, mask=place < K, sem="relaxed")
    if RENORMALISE:
        found = found / (tl.sum(found, 0) + 1.1754943508222875e-38)
    tl.store(expert_ids + row * K + place, ids, mask=place < K)
    tl.store(weights + row * K + place, found * scale, mask=place < K)


@triton.jit  # type: ignore[untyped-decorator]
def _of_best_groups(  # type: ignore[no-untyped-def]
    choice, e, E: tl.constexpr, G: tl.constexpr, G_PAD: tl.constexpr, G_CHOSEN: tl.constexpr, G_BEST: tl.constexpr
):
    """-inf outside the chosen groups."""
    group_of = e // (E // G)
    group = tl.arange(0, G_PAD)
    values = tl.full([G_PAD], float("-inf"), tl.float32)
    for g in range(G):
        own = tl.where((group_of == g) & (e < E), choice, float("-inf"))
        value = 0.0
        for _ in range(G_BEST):
            value += tl.max(own, 0)
            own = tl.where(e == tl.argmax(own, 0), float("-inf"), own)
        values = tl.where(group == g, value, values)
    is_chosen = e < 0
    for _ in range(G_CHOSEN):
        best = tl.argmax(values, 0)
        is_chosen = is_chosen | (group_of == best)
        values = tl.where(group == best, float("-inf"), values)
    return tl.where(is_chosen, choice, float("-inf"))


@triton.jit(do_not_specialize=["n_assigned"])  # type: ignore[untyped-decorator]
def count(expert_ids, counts, ranks, n_assigned, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Assignments of each expert, and which of them each is: any order will do, as rows are computed alone."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(expert_ids + at, mask=at < n_assigned, other=-1)
    rank = tl.atomic_add(counts + expert, 1, mask=expert >= 0, sem="relaxed")
    tl.store(ranks + at, rank, mask=at < n_assigned)


@triton.jit(do_not_specialize=["n_assigned", "n_blocks"])  # type: ignore[untyped-decorator]
def place(  # type: ignore[no-untyped-def]
    expert_ids, counts, ranks, table, order, n_assigned, n_blocks,
    E: tl.constexpr, E_PAD: tl.constexpr, BM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Places of assignments, and the table of blocks; a program has as many of both, as there are no more blocks."""
    e = tl.arange(0, E_PAD)
    own = tl.load(counts + e, mask=e < E, other=0)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(expert_ids + at, mask=at < n_assigned, other=-1)
    before = tl.sum(tl.where(e[None, :] < expert[:, None], own[None, :], 0), 1)
    rank = tl.load(ranks + at, mask=at < n_assigned, other=0)
    tl.store(order + before + rank, at, mask=expert >= 0)
    # Block `at` is the expert's whose blocks end behind it, the first such.
    blocks = (own + BM - 1) // BM
    ends = tl.cumsum(blocks, 0)
    is_past = ends[None, :] <= at[:, None]
    block_expert = tl.sum(is_past.to(tl.int32), 1)
    is_used = block_expert < E
    n_past = tl.sum(tl.where(is_past, blocks[None, :], 0), 1)
    rows_past = tl.sum(tl.where(is_past, own[None, :], 0), 1)
    rows_own = tl.sum(tl.where(e[None, :] == block_expert[:, None], own[None, :], 0), 1)
    first = (at - n_past) * BM
    tl.store(table + at, block_expert, mask=at < n_blocks)
    tl.store(table + n_blocks + at, rows_past + first, mask=at < n_blocks)
    rows = tl.where(is_used, tl.minimum(rows_own - first, BM), 0)
    tl.store(table + 2 * n_blocks + at, rows, mask=at < n_blocks)


@triton.jit  # type: ignore[untyped-decorator]
def add(each, expert_ids, y, y_stride, HIDDEN: tl.constexpr, K: tl.constexpr, ADDS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The outputs of a token's experts, and what was there before."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < HIDDEN
    total = tl.zeros([BLOCK], tl.float32)
    if ADDS:
        total += tl.load(y + row * y_stride + at, mask=inside, other=0.0).to(tl.float32)
    for j in range(K):
        end = tl.where(tl.load(expert_ids + row * K + j) >= 0, HIDDEN, 0)
        total += tl.load(each + (row * K + j) * HIDDEN + at, mask=at < end, other=0.0).to(tl.float32)
    tl.store(y + row * y_stride + at, total.to(y.dtype.element_ty), mask=inside)
