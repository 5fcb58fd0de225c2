"""Rows of trees: against plain torch in float64, and bit by bit against each path as a sequence of its own."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from paged_case import PagedCase, worst_error

from quire.kernels import native
from quire.kernels.attention import op, reference
from quire.kernels.attention import trees as tree_plans
from quire.kernels.attention.schedule.plan import AttnPlan, Trees
from quire.kernels.attention.variant import Variant, variants

native_only = pytest.mark.skipif(native.library() is None, reason="no native library was built")
SPANS = [(9, 9), (300, 31), (64, 1), (71, 8), (140, 65), (200, 120), (2, 2), (130, 5)]
"""(keys, rows); those of `TREES` are trees."""
TREES = {0: 1, 1: 1, 3: 1, 4: 1, 6: 1, 7: -2}
"""Span → its rows before node 0; -2: nodes 0 and 1 are no rows of it."""


def random_trees(case: PagedCase, rng: np.random.Generator) -> Trees:
    paths, firsts = np.zeros(case.n_rows, np.uint64), case.kv_lens.copy()
    for span, n_before in TREES.items():
        kv_len, length = case.spans[span]
        firsts[span] = kv_len - length + n_before
        n_nodes, found = kv_len - int(firsts[span]), list[int]()
        for node in range(n_nodes):
            parent = int(rng.integers(max(-1, node - 4), node))
            found.append((found[parent] if parent >= 0 else 0) | 1 << node)
        rows = [0, *found] if n_before > 0 else found[-n_before:]
        paths[case.q_indptr[span] : case.q_indptr[span + 1]] = np.array(rows, np.uint64)
    return Trees(paths, firsts)


def places_of(case: PagedCase, trees: Trees, span: int, row: int) -> list[int]:
    """Where the keys lie that a row sees, in their order."""
    kv_len, first = case.spans[span][0], int(trees.firsts[span])
    if first >= kv_len:
        return list(range(kv_len - int(case.q_indptr[span + 1]) + row + 1))
    path = int(trees.paths[row])
    return [*range(first), *(first + i for i in range(64) if path >> i & 1)]


def rows_of(case: PagedCase) -> list[tuple[int, int]]:
    return [(s, row) for s in range(len(case.spans)) for row in range(case.q_indptr[s], case.q_indptr[s + 1])]


def alone(case: PagedCase, trees: Trees) -> tuple[AttnPlan, torch.Tensor, torch.Tensor]:
    """A plan in which each row is the last of a sequence of its own, and the pages of that."""
    lists = [places_of(case, trees, span, row) for span, row in rows_of(case)]
    n_pages = [-(-len(one) // case.page_size) for one in lists]
    table, at = torch.zeros(len(lists), max(n_pages), dtype=torch.int32), 0
    pools = [torch.zeros(sum(n_pages), *x.shape[1:], dtype=x.dtype) for x in (case.k, case.v)]
    for line, ((span, _), places) in enumerate(zip(rows_of(case), lists, strict=True)):
        table[line, : n_pages[line]] = torch.arange(at, at + n_pages[line])
        old, new = torch.tensor(places), torch.arange(len(places))
        pages = case.page_table[case.slots[span]].long()[old // case.page_size]
        for pool, x in zip(pools, (case.k, case.v), strict=True):
            entries = x[pages, :, old % case.page_size]
            pool[at + new // case.page_size, :, new % case.page_size] = entries
        at += n_pages[line]
    lens = np.array([len(one) for one in lists], np.int32)
    plan = op.plan(
        np.arange(len(lists) + 1, dtype=np.int32), lens, np.arange(len(lists), dtype=np.int32), table,
        page_size=case.page_size, **dataclasses.asdict(case.heads),
    )  # fmt: skip
    return plan, *pools


def softmax_over(case: PagedCase, trees: Trees, window: int, n_first: int) -> torch.Tensor:
    """float64."""
    out = torch.zeros(case.n_rows, case.n_q_heads, case.head_dim, dtype=torch.float64)
    for span, row in rows_of(case):
        places = torch.tensor(places_of(case, trees, span, row))
        pages = case.page_table[case.slots[span]].long()[places // case.page_size]
        k, v = (x[pages, :, places % case.page_size].double() for x in (case.k, case.v))
        at = torch.arange(len(places))
        seen = (at > len(places) - 1 - window) | (at < n_first) if window else at >= 0
        q = case.q[row].double().unflatten(0, (case.n_kv_heads, -1))
        logits = torch.einsum("hgd,khd->hgk", q, k) * case.scale
        weights = logits.masked_fill(~seen, -torch.inf).softmax(-1)
        out[row] = torch.einsum("hgk,khd->hgd", weights, v).flatten(0, 1)
    return out


def made(seed: int, dtype: torch.dtype, **options: object) -> tuple[PagedCase, Trees]:
    rng = np.random.default_rng(seed)
    group, head_dim = int(rng.choice([1, 2, 4, 8])), int(rng.choice([32, 64, 96, 33]))
    case = PagedCase(SPANS, int(rng.choice([3, 8, 16])), 2, group, head_dim, dtype, seed=seed, **options)
    return case, random_trees(case, rng)


@pytest.mark.parametrize("window", [(0, 0), (20, 0), (5, 3), (100, 0)])
@pytest.mark.parametrize("seed", range(4))
def test_the_reference(seed: int, window: tuple[int, int]) -> None:
    case, trees = made(seed, torch.float64)
    variant = Variant(case.scale, window=window[0], n_first=window[1])
    plan, out = case.plan(variant, trees=trees), torch.zeros_like(case.q)
    reference.run(case.q, case.k, case.v, plan, variant, out, None)
    assert worst_error(out[: case.n_rows], softmax_over(case, trees, *window)) < 1e-12


@pytest.mark.parametrize("seed", range(4))
def test_the_mask_for_kernels_that_know_no_trees(seed: int) -> None:
    case, of = made(seed, torch.float64)
    odd = Variant(case.scale, logits_mask=lambda site, p: (site.q_head + site.q_row) % 3 < 2)
    for variant in (Variant(case.scale), variants.soft_cap(case.scale, 2.0), odd):
        outs = [torch.zeros_like(case.q) for _ in range(2)]
        with_trees, without = case.plan(variant, trees=of), case.plan(variant)
        reference.run(case.q, case.k, case.v, with_trees, variant, outs[0], None)
        masked = tree_plans.masked(variant, with_trees, torch.device("cpu"))
        reference.run(case.q, case.k, case.v, without, masked, outs[1], None)
        assert worst_error(outs[0][: case.n_rows], outs[1][: case.n_rows]) < 1e-12


def test_what_has_no_mask() -> None:
    cuda, window = torch.device("cuda"), Variant(1.0, window=9)
    slopes = variants.alibi(1.0, torch.ones(4))
    assert "a window of 9 keys" in tree_plans.obstacle(window, cuda) and "positions" in tree_plans.obstacle(
        slopes, cuda
    )
    assert not any(tree_plans.obstacle(one, torch.device("cpu")) for one in (window, slopes))
    assert not tree_plans.obstacle(variants.soft_cap(1.0, 3.0), cuda)


@native_only
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [(0, 0), (20, 0), (5, 3), (100, 0)])
@pytest.mark.parametrize("seed", range(4))
def test_against_float64(seed: int, window: tuple[int, int], dtype: torch.dtype) -> None:
    case, trees = made(seed, dtype)
    variant = Variant(case.scale, window=window[0], n_first=window[1])
    out = op.run(case.q, case.k, case.v, case.plan(variant, trees=trees), variant)
    error = worst_error(out[: case.n_rows], softmax_over(case, trees, *window))
    assert error < reference.TOLERANCE[dtype]


@native_only
@pytest.mark.parametrize("kv_dtype", [None, torch.int8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("seed", range(6))
def test_bits_are_those_without_a_tree(seed: int, dtype: torch.dtype, kv_dtype: torch.dtype | None) -> None:
    case, trees = made(seed, dtype, kv_dtype=kv_dtype)
    plan, k, v = alone(case, trees)
    hooked = [variants.soft_cap(case.scale, 20.0)] if dtype == torch.float32 and kv_dtype is None else []
    for variant in (Variant(case.scale), Variant(case.scale, window=30), *hooked):
        together = op.run(case.q, case.k, case.v, case.plan(trees=trees), variant)
        apart = op.run(case.q[: case.n_rows], k, v, plan, variant)
        assert torch.equal(together[: case.n_rows], apart)


def test_what_is_refused() -> None:
    case, trees = made(0, torch.float32)
    none = dataclasses.replace(trees, firsts=np.zeros_like(trees.firsts))
    with pytest.raises(ValueError, match="span 0 has 9 nodes: 0 to 64 behind a root are possible"):
        case.plan(trees=none)
    paths = trees.paths.copy()
    paths[0] = 1 << 40
    with pytest.raises(ValueError, match="has a node that its span has not"):
        case.plan(trees=Trees(paths, trees.firsts))
    with pytest.raises(ValueError, match=r"trees need uint64 \[241\], not uint64 \[240\]"):
        case.plan(trees=Trees(paths[1:], trees.firsts))
    turned = variants.rotary(case.scale, torch.zeros(512, case.head_dim // 2 * 2))
    if case.head_dim % 2 == 0:
        with pytest.raises(
            ValueError,
            match="a variant cannot run the trees of the plan: its attention has key_",
        ):
            op.run(case.q, case.k, case.v, case.plan(trees=trees), turned)
