"""Native CPU attention: against the float64 reference, against torch's own, and bitwise against itself."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from paged_case import PagedCase, random_case, worst_error

from quire.kernels import attention
from quire.kernels.attention import cpu, reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
HEAD_DIMS = [8, 16, 20, 33, 64, 80, 96, 128, 256]


@functools.cache
def solved_case(seed: int, dtype: torch.dtype) -> tuple[PagedCase, attention.Variant, torch.Tensor]:
    case, variant = random_case(seed, dtype, HEAD_DIMS, longest=600)
    return case, variant, case.expected(variant)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_random_batches_match_float64(level: str, dtype: torch.dtype) -> None:
    for seed in range(10):
        case, variant, expected = solved_case(seed, dtype)
        got = attention.run(case.q, case.k_pages, case.v_pages, case.plan(), variant)[: case.n_tokens]
        assert worst_error(got, expected) <= reference.TOLERANCE[dtype], (seed, case.spans, variant)


def test_reference_matches_torch() -> None:
    """The oracle itself, against torch's dense causal attention."""
    case = PagedCase([(77, 77)], 16, 2, 3, 32, torch.float64)
    pages = case.page_table[case.slots[0]].long()
    keys, values = (p[pages].transpose(1, 2).flatten(0, 1)[:77].transpose(0, 1) for p in (case.k_pages, case.v_pages))
    q = case.q[:77].transpose(0, 1)
    expected = F.scaled_dot_product_attention(q, keys, values, is_causal=True, scale=0.2, enable_gqa=True)
    assert worst_error(case.expected(attention.Variant(0.2)), expected.transpose(0, 1)) < 1e-12


def test_reference_window_is_the_last_w_positions() -> None:
    """With window w the answer is that of the sequence whose older keys are cut away."""
    case = PagedCase([(50, 1)], 8, 1, 2, 16, torch.float64)
    pages = case.page_table[case.slots[0]].long()
    keys, values = (p[pages].transpose(1, 2).flatten(0, 1)[40:50].transpose(0, 1) for p in (case.k_pages, case.v_pages))
    expected = F.scaled_dot_product_attention(case.q[:1].transpose(0, 1), keys, values, scale=0.25, enable_gqa=True)
    assert worst_error(case.expected(attention.Variant(0.25, window=10)), expected.transpose(0, 1)) < 1e-12


@pytest.mark.parametrize(("dtype", "window"), list(itertools.product(DTYPES, (0, 70))), ids=str)
def test_rows_do_not_depend_on_anything_else(level: str, dtype: torch.dtype, window: int) -> None:
    """Bitwise: neighbours, chunking, page ids, page size, tile size and threads change nothing."""
    if level == "torch":
        pytest.skip("the torch path makes no such promise")
    variant = attention.Variant(0.125, window=window)
    for head_dim, group in ((64, 4), (80, 1), (128, 8)):
        prompt = PagedCase([(200, 200)], 16, 2, group, head_dim, dtype, seed=5)
        whole = attention.run(prompt.q, prompt.k_pages, prompt.v_pages, prompt.plan(), variant)[:200]
        for lengths, page_size in (([199, 1], 4), ([1, 70, 64, 65], 16), ([1] * 200, 128)):
            assert torch.equal(in_chunks(prompt, lengths, page_size, variant), whole), (head_dim, lengths)


def in_chunks(prompt: PagedCase, lengths: list[int], page_size: int, variant: attention.Variant) -> torch.Tensor:
    """The rows of `prompt` again: its keys in other pages, its tokens in chunks, each beside two random neighbours."""
    n = prompt.n_tokens
    spans = [(111, 37), (n, n), (90, 1)]
    batch = PagedCase(spans, page_size, prompt.n_kv_heads, prompt.group, prompt.head_dim, prompt.dtype, seed=9)
    positions = torch.arange(n)
    source = prompt.page_table[prompt.slots[0]].long()[positions // prompt.page_size]
    target = batch.page_table[batch.slots[1]].long()[positions // page_size]
    for mine, theirs in ((batch.k_pages, prompt.k_pages), (batch.v_pages, prompt.v_pages)):
        mine[target, :, positions % page_size] = theirs[source, :, positions % prompt.page_size]
    rows = slice(37, 37 + n)
    batch.q[rows] = prompt.q[:n]
    ends = np.cumsum(lengths)
    plan = attention.plan(
        np.concatenate(([0, 37], 37 + ends, [38 + n])).astype(np.int32),
        np.concatenate(([111], ends, [90])).astype(np.int32),
        np.repeat(batch.slots, (1, len(lengths), 1)),
        batch.page_table,
        **batch.shape(),
    )
    return attention.run(batch.q, batch.k_pages, batch.v_pages, plan, variant)[rows]


def test_threads_and_order_of_tiles_change_nothing(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = PagedCase([(400, 150), (33, 1), (500, 1), (64, 64)], 16, 2, 2, 64, torch.bfloat16)
    variant = attention.Variant(0.125)
    outputs = []
    before = torch.get_num_threads()
    for n_threads, tile_rows in ((1, 96), (2, 96), (2, 10)):
        monkeypatch.setattr(cpu, "TILE_ROWS", tile_rows)
        torch.set_num_threads(n_threads)
        outputs.append(attention.run(case.q, case.k_pages, case.v_pages, case.plan(), variant)[: case.n_tokens])
    torch.set_num_threads(before)
    if level != "torch":
        assert all(torch.equal(outputs[0], other) for other in outputs[1:])


def test_strided_queries_and_given_output(level: str) -> None:
    """q may be a slice of a fused projection; `out` is filled and returned."""
    case = PagedCase([(40, 40), (20, 3)], 16, 2, 2, 64, torch.bfloat16)
    fused = torch.zeros(case.q.shape[0], 4 * 64 + 99, dtype=case.q.dtype)
    strided = fused[:, 50 : 50 + 256].unflatten(1, (4, 64))
    strided.copy_(case.q)
    plan, out = case.plan(), torch.empty_like(case.q)
    got = attention.run(strided, case.k_pages, case.v_pages, plan, attention.Variant(0.1), out=out)
    plain = attention.run(case.q, case.k_pages, case.v_pages, plan, attention.Variant(0.1))
    assert got is out
    assert torch.equal(got[: case.n_tokens], plain[: case.n_tokens])


def test_nothing_to_do(level: str) -> None:
    case = PagedCase([(40, 0), (7, 0)], 16, 2, 2, 16, torch.float32)
    assert attention.run(case.q, case.k_pages, case.v_pages, case.plan(), attention.Variant(1.0)).shape == (3, 4, 16)
    empty = PagedCase([], 16, 2, 2, 16, torch.float32)
    assert attention.run(empty.q[:0], empty.k_pages, empty.v_pages, empty.plan(), attention.Variant(1.0)).shape == (
        0,
        4,
        16,
    )


def test_large_and_non_finite_scores_stay_in_their_row(level: str) -> None:
    """Scores of thousands do not overflow; a NaN query spoils its own row only."""
    case = PagedCase([(100, 100)], 16, 1, 2, 32, torch.float32)
    case.q[:100] *= 1000
    case.q[50, 0] = float("nan")
    variant = attention.Variant(1.0)
    got = attention.run(case.q, case.k_pages, case.v_pages, case.plan(), variant)[:100]
    good = torch.ones(100, 2, dtype=torch.bool)
    good[50, 0] = False
    assert bool(got[50, 0].isnan().all())
    assert worst_error(got[good], case.expected(variant)[good]) < 1e-3


def test_cut_covers_every_token_once_and_sorts_by_cost() -> None:
    q_indptr, kv_lens = np.array([0, 5, 5, 6, 30], np.int32), np.array([5, 9, 1000, 24], np.int32)
    tiles = cpu.cut(q_indptr, kv_lens, 10)
    assert tiles.tolist() == [[2, 0, 1], [3, 10, 10], [3, 0, 10], [3, 20, 4], [0, 0, 5]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q_indptr": np.array([0, 3], np.int32)}, "q_indptr has 2"),
        ({"q_indptr": np.array([0, 30, 33], np.int32)}, "length <= kv_len"),
        ({"kv_lens": np.array([20, 4000], np.int32)}, "do not fit"),
    ],
)
def test_bad_plans_are_refused(change: dict[str, np.ndarray], message: str) -> None:
    case = PagedCase([(20, 3), (30, 3)], 16, 1, 2, 16, torch.float32)
    arguments = {"q_indptr": case.q_indptr, "kv_lens": case.kv_lens, "slots": case.slots, **change}
    with pytest.raises(ValueError, match=message):
        attention.plan(*arguments.values(), case.page_table, **case.shape())


def test_tensors_that_do_not_fit_the_plan_are_refused() -> None:
    case = PagedCase([(20, 3)], 16, 1, 2, 16, torch.float32)
    plan, variant = case.plan(), attention.Variant(1.0)
    with pytest.raises(ValueError, match="does not fit a plan"):
        attention.run(case.q[:2], case.k_pages, case.v_pages, plan, variant)
    with pytest.raises(ValueError, match="pages are"):
        attention.run(case.q.half(), case.k_pages, case.v_pages, plan, variant)
    with pytest.raises(ValueError, match="contiguous and like q"):
        attention.run(case.q, case.k_pages, case.v_pages, plan, variant, out=torch.empty(1))
