"""What `plan` and `run` refuse, and what choosing an implementation keeps."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch
from paged_case import PagedCase

from quire.kernels.attention import op, selection
from quire.kernels.attention.schedule.plan import AttnPlan, SharedPrefix
from quire.kernels.attention.variant import Variant, variants

torch.set_num_threads(1)
PLAIN = Variant(0.25)


def plan(
    lengths: list[int],
    kv_lens: list[int],
    n_q_heads: int = 4,
    n_kv_heads: int = 2,
    page_size: int = 16,
    **options: object,
) -> AttnPlan:
    """Spans with these rows and keys, each with a slot of its own, on a table of 8 pages a slot."""
    indptr = np.concatenate(([0], np.cumsum(lengths)))
    return op.plan(
        indptr, np.array(kv_lens), np.arange(len(kv_lens)), torch.zeros(4, 8, dtype=torch.int32),
        page_size=page_size, n_q_heads=n_q_heads, n_kv_heads=n_kv_heads, head_dim=16, **options,
    )  # fmt: skip


def listed(indices: list[int]) -> dict[str, object]:
    return {"blocks": (np.array([0, len(indices)]), np.array(indices))}


def shared(spans: list[int], n_keys: int) -> dict[str, object]:
    return {"shared": [SharedPrefix(spans, n_keys)]}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: plan([1, -1], [5, 5]), "span 1 has -1 rows and 5 keys"),
        (lambda: plan([1, 6], [5, 5]), "causal span 1 has 6 rows but 5 keys"),
        (lambda: plan([1], [5], n_kv_heads=0), "4 query heads for 0 KV heads"),
        (lambda: plan([1], [5], n_q_heads=3), "3 query heads for 2 KV heads"),
        (lambda: plan([1], [129]), "129 tokens do not fit 8 pages of 16 tokens"),
        (lambda: plan([1] * 5, [5] * 5), r"slots 0 .. 4 leave the page table of 4 rows"),
        (lambda: plan([1], [40], **listed([3])), "an index lies outside"),
        (lambda: plan([1], [40], **listed([1 << 28])), "an index lies outside"),
        (lambda: plan([1], [40], **listed([1, 0])), "must ascend"),
        (lambda: plan([1, 1], [40, 40], **shared([0, 2], 32)), "names span 2, the plan has 2"),
        (lambda: plan([1, 1], [40, 40], **shared([0, 1], 30)), "30 keys: give whole pages of 16"),
        (lambda: plan([1, 8], [40, 39], **shared([0, 1], 32)), "span 1 begins at position 31, inside its shared"),
        (lambda: plan([1, 1], [40, 40], **shared([0, 0], 32)), "span 0 has 2 shared prefixes"),
        (lambda: op.plan_buffers(plan([1], [5]), 1), "the device of its pages: cpu"),
    ],
)  # fmt: skip
def test_plan_names_what_does_not_fit(call: Callable[[], AttnPlan], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(1, 4, 8)}, "q .* does not fit a plan"),
        ({"k": torch.zeros(9, 2, 16, 16, device="meta")}, "are on cpu, meta and cpu"),
        ({"v": torch.zeros(9, 2, 16, 16, dtype=torch.float16)}, "use q's dtype"),
        ({"out": torch.zeros(1, 4, 16, dtype=torch.float16)}, "must be contiguous and like q"),
        ({"out": torch.zeros(1, 4, 16, device="meta")}, "on meta must be contiguous and like q"),
        ({"lse": torch.zeros(1, 4, device="meta")}, "on meta must be contiguous float32"),
        ({"variant": variants.alibi(1.0, torch.zeros(4, device="meta"))}, "'slopes' of the variant is on meta"),
        ({"variant": Variant(1.0, causal=False)}, "not causal but the plan is"),
    ],
)
def test_run_names_what_does_not_fit(change: dict[str, object], message: str) -> None:
    pages = torch.zeros(9, 2, 16, 16)
    given = {"q": torch.zeros(1, 4, 16), "k": pages, "v": pages, "plan": plan([1], [40]), "variant": PLAIN}
    with pytest.raises(ValueError, match=message):
        op.run(**(given | change))


def test_a_page_table_beyond_32_bits_is_refused() -> None:
    table, one = torch.empty(1 << 14, 1 << 17, dtype=torch.int32, device="meta"), np.array([1])
    sizes = {"page_size": 1, "n_q_heads": 4, "n_kv_heads": 2, "head_dim": 16}
    with pytest.raises(ValueError, match="2147483648 entries: indices have 32 bits"):
        op.plan(np.array([0, 1]), one, one, table, **sizes)


def test_choosing_an_implementation_keeps_neither_plan_nor_parameters() -> None:
    case = PagedCase([(5, 1)], 8, 2, 2, 16, torch.float32)
    planned, variant = case.plan(), variants.learned_sinks(0.25, torch.zeros(4))
    kept = weakref.ref(planned.work.tiles), weakref.ref(variant.tensors["sinks"])
    selection.choose(planned, variant, torch.device("cpu"), torch.float64, torch.float64)
    del planned, variant
    gc.collect()
    assert [reference() for reference in kept] == [None, None]
