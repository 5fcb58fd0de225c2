"""The reference itself: layouts agree with each other and with a dense mask, and dead memory never shows."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from paged_case import VARIANTS, PagedCase, random_case, worst_error

from quire.kernels import catalog
from quire.kernels.attention import reference
from quire.kernels.attention.schedule.plan import Layout, SharedPrefix
from quire.kernels.attention.variant import Variant, variants
from quire.kernels.attention.variant.expression import where

torch.set_num_threads(1)
SPANS = [(40, 7), (9, 0), (33, 1), (21, 21), (1, 1)]
F64 = torch.float64


def keys_of(case: PagedCase, span: int) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 [kv_len, n_kv_heads, head_dim], read one by one from where the case put them."""
    kv_len, at = int(case.kv_lens[span]), int(case.kv_at[span])
    if case.layout is Layout.RAGGED:
        return tuple(pool[at : at + kv_len].double() for pool in (case.k, case.v))
    places = [(int(case.page_table[at, i // case.page_size]), i % case.page_size) for i in range(kv_len)]
    return tuple(torch.stack([pool[page, :, i] for page, i in places]).double() for pool in (case.k, case.v))


def rows_of(case: PagedCase, span: int) -> slice:
    return slice(*case.q_indptr[span : span + 2].tolist())


def visible_pages(case: PagedCase, span: int) -> torch.Tensor:
    """bool [kv_len]: the keys that the span's list names."""
    kv_len = int(case.kv_lens[span])
    if case.layout is not Layout.SPARSE:
        return torch.ones(kv_len, dtype=torch.bool)
    listed = case.blocks[case.block_indptr[span] : case.block_indptr[span + 1]].tolist()
    return torch.tensor([i // case.page_size in listed for i in range(kv_len)])


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("layout", Layout)
def test_every_layout_is_dense_attention(layout: Layout, strided: bool) -> None:
    """Against torch's own attention with the mask written out; a row whose list is empty sees nothing."""
    sequences = None if layout is Layout.RAGGED else [0, 1, 2, 3, 0]
    spans = SPANS[:4] + ([(32, 5)] if sequences else [(5, 5)])
    case = PagedCase(spans, 4, 2, 3, 16, F64, seed=3, layout=layout, strided=strided, sequences=sequences)
    out, lse = case.expected_state(variants.causal(0.3, window=15, n_first=2))
    for span, (kv_len, length) in enumerate(spans):
        if length:
            k, v = keys_of(case, span)
            position, key = torch.arange(kv_len - length, kv_len)[:, None], torch.arange(kv_len)
            mask = (key <= position) & ((key > position - 15) | (key < 2)) & visible_pages(case, span)
            heads = [x.transpose(0, 1) for x in (case.q[rows_of(case, span)], k, v)]
            expected = F.scaled_dot_product_attention(*heads, attn_mask=mask, scale=0.3, enable_gqa=True)
            seen = mask.any(1)
            got = out[rows_of(case, span)]
            assert worst_error(got[seen], expected.transpose(0, 1)[seen]) < 1e-12
            assert bool((got[~seen] == 0).all())
            assert bool((lse[rows_of(case, span)].isneginf().all(1) == ~seen).all())


@pytest.mark.parametrize("name", VARIANTS)
def test_blocks_of_rows_change_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for layout in Layout:
        case = PagedCase(SPANS, 8, 2, 2, 12, F64, seed=1, layout=layout)
        variant = VARIANTS[name](np.random.default_rng(0), case)
        whole, state = case.expected_state(variant)
        monkeypatch.setattr(reference, "MAX_BLOCK_ROWS", 3)
        out, lse = case.expected_state(variant)
        monkeypatch.setattr(reference, "MAX_BLOCK_ROWS", 256)
        assert worst_error(out, whole) < 1e-12
        assert not variant.softmax or worst_error(lse, state) < 1e-12


def test_memory_is_bounded_by_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """70,000 keys: no block has more logits than MAX_LOGITS, and the answer is torch's."""
    case = PagedCase([(70_000, 600)], 64, 1, 2, 8, torch.float32, seed=1)
    sizes = []
    weigh = reference._Block._weigh
    monkeypatch.setattr(
        reference._Block,
        "_weigh",
        lambda self, logits, mask: (sizes.append(logits.numel()), weigh(self, logits, mask))[1],
    )
    out = torch.empty_like(case.q)
    reference.run(case.q, case.k, case.v, case.bare_plan(), variants.causal(1.0, window=2), out, None)
    assert 0 < max(sizes) <= reference.MAX_LOGITS < 600 * 2 * 70_000
    k, v = keys_of(case, 0)
    last = torch.softmax((case.q[599].double() @ k[-2:, 0].T), dim=-1) @ v[-2:, 0]
    assert worst_error(out[599], last) < reference.TOLERANCE[torch.float32]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_narrow_types_stay_within_tolerance(dtype: torch.dtype) -> None:
    for seed in range(12):
        case, variant = random_case(seed, dtype, [16, 33, 64], longest=120)
        out, lse = torch.empty_like(case.q), torch.zeros(case.q.shape[:2])
        reference.run(case.q, case.k, case.v, case.bare_plan(variant), variant, out, lse)
        expected, state = case.expected_state(variant)
        assert worst_error(out[: case.n_rows], expected) <= reference.TOLERANCE[dtype], (seed, case.layout)
        assert not variant.softmax or worst_error(lse[: case.n_rows], state) <= 1e-5


def test_fp8_pages_are_converted() -> None:
    case = PagedCase(SPANS, 8, 2, 2, 16, torch.bfloat16, kv_dtype=torch.float8_e4m3fn)
    assert case.k.dtype == torch.float8_e4m3fn
    wide = dataclasses.replace(case)
    wide.k, wide.v = case.k.to(torch.bfloat16), case.v.to(torch.bfloat16)
    variant = variants.causal(0.25)
    assert torch.equal(case.expected(variant), wide.expected(variant))


def test_a_shared_prefix_is_the_same_pages() -> None:
    spans = [(20, 2), (17, 1), (30, 8)]
    case = PagedCase(spans, 4, 1, 2, 8, F64, shared=[SharedPrefix([0, 2], 12)])
    first, other, second = (case.page_table[slot, :4].tolist() for slot in case.slots)
    assert first[:3] == second[:3]
    assert not set(first) & set(other)
    assert first[3] != second[3]
    assert torch.equal(keys_of(case, 0)[0][:12], keys_of(case, 2)[0][:12])


def test_a_nan_query_spoils_its_own_row_only() -> None:
    case = PagedCase([(50, 50)], 16, 1, 2, 16, torch.float32)
    clean = case.expected(variants.causal(0.25))
    case.q[20, 1] = float("nan")
    got = case.expected(variants.causal(0.25))
    spoiled = got.isnan()
    assert bool(spoiled[20, 1].all())
    assert int(spoiled.sum()) == 16
    assert torch.equal(got[~spoiled], clean[~spoiled])


def test_logits_of_minus_infinity_hide_a_key() -> None:
    """What users of other libraries write in place of a mask."""
    case = PagedCase([(30, 30)], 8, 1, 2, 8, F64)
    minus = float("-inf")
    by_logit = Variant(0.3, logits_transform=lambda x, site, p: where(site.k_pos % 3 == 1, x, minus))
    by_mask = Variant(0.3, logits_mask=lambda site, p: site.k_pos % 3 == 1)
    got, expected = case.expected_state(by_logit), case.expected_state(by_mask)
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[1], expected[1])
    assert bool((got[0][0] == 0).all())


def test_nothing_to_do() -> None:
    for spans in ([], [(9, 0), (3, 0)]):
        case = PagedCase(spans, 8, 1, 1, 8, torch.float32)
        assert case.expected(variants.causal(1.0)).shape == (0, 1, 8)
    assert catalog.condition_of(reference) is None, "it takes all inputs"
