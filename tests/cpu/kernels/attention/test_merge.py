"""Merging of attention states: parts of the keys, merged, are all of them."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from attention_states import random_states
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_case import PagedCase, worst_error

from quire.kernels import attention
from quire.kernels.attention import reference
from quire.kernels.attention.schedule.plan import AttnPlan, AttnSpans, Layout
from quire.kernels.attention.variant import variants

torch.set_num_threads(1)
NOTHING = float("-inf")
SHAPE = 7, 3, 8
State = tuple[torch.Tensor, torch.Tensor]


def state_of(case: PagedCase, variant: attention.Variant, pages: np.ndarray) -> State:
    """Attention of the case's only span to these pages alone."""
    indptr = np.array([0, len(pages)], np.int32)
    spans = AttnSpans(case.q_indptr, case.kv_lens, case.kv_at, indptr, pages.astype(np.int32))
    plan = AttnPlan(Layout.SPARSE, case.heads, case.page_size, spans, case.page_table, variant.causal)
    out, lse = torch.empty_like(case.q), torch.empty(case.q.shape[:2], dtype=torch.float32)
    reference.run(case.q, case.k, case.v, plan, variant, out, lse)
    return out[: case.n_rows], lse[: case.n_rows]


@settings(max_examples=25)
@given(st.integers(0, 10**6), st.integers(1, 5))
def test_parts_merged_are_the_whole(seed: int, n_parts: int) -> None:
    """Any partition of the pages: also parts that some rows, or all rows, see nothing of."""
    rng = np.random.default_rng(seed)
    kv_len = int(rng.integers(1, 60))
    case = PagedCase([(kv_len, int(rng.integers(1, kv_len + 1)))], 4, 2, 2, 8, torch.float32, seed=seed)
    variant = variants.soft_cap(0.4, 3.0)
    owner = rng.integers(0, n_parts, -(-kv_len // 4))
    outs, lses = zip(*(state_of(case, variant, np.flatnonzero(owner == part)) for part in range(n_parts)), strict=True)
    out, lse = attention.merge(outs, lses)
    expected, state = case.expected_state(variant)
    assert out.dtype == lse.dtype == torch.float32
    assert worst_error(out, expected) <= reference.TOLERANCE[torch.float32]
    assert worst_error(lse, state) <= reference.TOLERANCE[torch.float32]


def test_order_and_grouping_do_not_matter() -> None:
    a, b, c = zip(*random_states(3, SHAPE, torch.float32), strict=True)
    at_once = attention.merge((a[0], b[0], c[0]), (a[1], b[1], c[1]))
    for first, second, third in ((a, b, c), (c, a, b), (b, c, a)):
        out, lse = attention.merge([first[0], second[0]], [first[1], second[1]])
        got = attention.merge([out, third[0]], [lse, third[1]])
        assert worst_error(got[0], at_once[0]) <= reference.TOLERANCE[torch.float32]
        assert worst_error(got[1], at_once[1]) <= 2e-5, "lse of about 100"


def test_states_that_saw_nothing_weigh_nothing_whatever_they_hold() -> None:
    (out, *_), (lse, *_) = random_states(2, SHAPE, torch.float32)
    out, lse = out.nan_to_num(1.0), lse.clamp(min=-50.0)
    poison = torch.full_like(out, float("nan"))
    got = attention.merge([poison, out, poison], [torch.full_like(lse, NOTHING), lse, torch.full_like(lse, NOTHING)])
    assert torch.equal(got[0], out)
    assert torch.equal(got[1], lse)
    nothing = attention.merge(torch.stack([poison, poison]), torch.full((2, 7, 3), NOTHING))
    assert bool((nothing[0] == 0).all())
    assert bool((nothing[1] == NOTHING).all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_narrow_outputs_are_accumulated_in_float32(dtype: torch.dtype) -> None:
    outs, lses = random_states(20, SHAPE, dtype)
    out, lse = attention.merge(outs, lses)
    expected, _ = attention.merge(outs.double(), lses)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    assert torch.equal(out, expected.to(dtype))


@pytest.mark.parametrize(
    ("outs", "lses", "message"),
    [
        (torch.zeros(2, 3, 4, 8), torch.zeros(2, 3, 5), "outs (2, 3, 4, 8) and lses (2, 3, 5)"),
        (torch.zeros(3, 4, 8), torch.zeros(3, 4), "outs (3, 4, 8) and lses (3, 4)"),
        (torch.zeros(2, 3, 4, 8), torch.zeros(2, 3, 4, dtype=torch.int32), "torch.int32 must be"),
    ],
)
def test_mismatches_are_named(outs: torch.Tensor, lses: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        attention.merge(outs, lses)
