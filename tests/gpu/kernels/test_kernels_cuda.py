"""The Triton kernels on a real GPU: against float64, in a CUDA graph, and without a wait for the device."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from paged_case import PagedCase, random_case, worst_error

from quire.kernels import act, attention, kvstore, norm, rope
from quire.kernels.act import reference as act_reference
from quire.kernels.attention import reference
from quire.kernels.kvstore import reference as kvstore_reference
from quire.kernels.norm import reference as norm_reference
from quire.kernels.rope import reference as rope_reference

pytestmark = pytest.mark.gpu

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SPLIT_SPANS = [[(16000, 1)], [(9000, 1), *[(300, 1)] * 63], [(4096, 64), (700, 700), (50, 1)]]


def attend(case: PagedCase, plan: attention.AttnPlan, variant: attention.Variant) -> torch.Tensor:
    return attention.run(case.q, case.k_pages, case.v_pages, plan, variant)[: case.n_tokens]


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((got.double() - expected).abs() / (1 + expected.abs())).max())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_random_batches_match_float64(dtype: torch.dtype) -> None:
    for seed in range(24):
        case, variant = random_case(seed, dtype, [16, 32, 64, 80, 96, 128, 256], longest=3000 if seed % 2 else 400)
        case.to("cuda")
        error = worst_error(attend(case, case.plan(), variant), case.expected(variant))
        # tanh is made from exp2 here: a soft-cap of c adds up to c * 2**-23 to a score, and that to its probability.
        tolerance = reference.TOLERANCE[dtype] + variant.softcap * 2**-23 * (dtype == torch.float32)
        assert error <= tolerance, (seed, case.spans, case.page_size, case.group, variant, error)


@pytest.mark.parametrize(
    "spans", [[(16000, 1)], [(9000, 1), *[(300, 1)] * 63], [(4096, 64), (700, 700), (50, 1)]], ids=str
)
def test_llama_shapes_with_split_keys(spans: list[tuple[int, int]]) -> None:
    case = PagedCase(spans, 16, 8, 4, 128, torch.bfloat16).to("cuda")
    variant = attention.Variant(128**-0.5)
    plan = case.plan()
    assert len(plan.tiles.merges) > 0
    got = attend(case, plan, variant)
    assert worst_error(got, case.expected(variant)) <= reference.TOLERANCE[torch.bfloat16]
    assert torch.equal(got, attend(case, case.plan(), variant)), "two runs differ"


def test_decode_in_a_cuda_graph() -> None:
    """One capture serves later steps of other lengths and batch sizes."""
    variant = attention.Variant(128**-0.5)
    case = PagedCase([(5000, 1), *[(200 + i, 1) for i in range(15)]], 16, 8, 4, 128, torch.bfloat16).to("cuda")
    buffers = attention.plan_buffers(case.plan(), max_spans=16)
    q, out = case.q.clone(), torch.empty_like(case.q)

    def plan_of(n_spans: int, cut: int) -> attention.AttnPlan:
        kv_lens = np.maximum(case.kv_lens[:n_spans] - cut, 1)
        where = case.q_indptr[: n_spans + 1], kv_lens, case.slots[:n_spans], case.page_table
        return attention.plan(*where, **case.shape(), buffers=buffers)

    plan = plan_of(16, 0)
    attention.run(q, case.k_pages, case.v_pages, plan, variant, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attention.run(q, case.k_pages, case.v_pages, plan, variant, out=out)
    for n_spans, cut in ((16, 0), (3, 150), (1, 4000), (16, 7)):
        planned = plan_of(n_spans, cut)
        graph.replay()
        bare = dataclasses.replace(planned, tiles=None)
        wide = (x.double() for x in (q, case.k_pages, case.v_pages))
        expected = reference.run(*wide, bare, variant, torch.zeros(q.shape, dtype=torch.float64, device="cuda"))
        assert worst_error(out[:n_spans], expected[:n_spans]) <= reference.TOLERANCE[torch.bfloat16], (n_spans, cut)


def test_nothing_waits_for_the_device() -> None:
    case = PagedCase([(3000, 1), (500, 300), (40, 1)], 16, 2, 4, 128, torch.bfloat16).to("cuda")
    variant = attention.Variant(0.1)
    attend(case, case.plan(), variant)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        attend(case, case.plan(), variant)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "h"), [(1, 4096), (300, 1024), (64, 2880)])
def test_norm_and_activation(dtype: torch.dtype, n: int, h: int) -> None:
    x, residual = (torch.randn(n, h, device="cuda").to(dtype) for _ in range(2))
    weight = torch.randn(h, device="cuda").to(dtype)
    expected = norm_reference.rms_norm(x.double(), weight.double(), 1e-5)
    assert relative_error(norm.rms_norm(x, weight, 1e-5), expected) <= norm_reference.TOLERANCE[dtype]
    total = x + residual
    normed, new_residual = norm.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(new_residual, total)
    expected = norm_reference.rms_norm(total.double(), weight.double(), 1e-5)
    assert relative_error(normed, expected) <= norm_reference.TOLERANCE[dtype]
    gate_up = torch.randn(n, 2 * h, device="cuda").to(dtype) * 3
    expected = act_reference.silu_mul(gate_up.double())
    assert relative_error(act.silu_mul(gate_up), expected) <= act_reference.TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("hq", "hk", "d", "rotary"), [(32, 8, 128, 128), (16, 8, 64, 64), (12, 4, 80, 20)])
def test_qk_norm_rope_and_store(dtype: torch.dtype, hq: int, hk: int, d: int, rotary: int) -> None:
    fused = torch.randn(77, (hq + 2 * hk) * d, device="cuda").to(dtype)
    q, k, v = (part.unflatten(1, (-1, d)) for part in fused.split([hq * d, hk * d, hk * d], dim=1))
    weight = torch.randn(d, device="cuda").to(dtype)
    expected = norm_reference.rms_norm(q.double(), weight.double(), 1e-6)
    assert relative_error(norm.rms_norm(q, weight, 1e-6), expected) <= norm_reference.TOLERANCE[dtype]
    positions, cos_sin = torch.randint(0, 900, (77,), device="cuda"), torch.randn(900, rotary, device="cuda")
    expected = rope_reference.apply_rope(q.double(), k.double(), positions, cos_sin.double())
    rotated = rope.apply_rope(q, k, positions, cos_sin)
    for got, right in zip(rotated, expected, strict=True):
        assert relative_error(got, right) <= rope_reference.TOLERANCE[dtype]
    pools = [torch.zeros(12, hk, 16, d, device="cuda", dtype=dtype) for _ in range(2)]
    wanted = [pool.clone() for pool in pools]
    cells = torch.randperm(12 * 16, device="cuda")[:77]
    kvstore.store_kv(rotated[1], v, *pools, cells)
    kvstore_reference.store_kv(rotated[1], v, *wanted, cells)
    kvstore.copy_pages(*pools, [1, 3], [2, 4], [16, 3])
    kvstore_reference.copy_pages(*wanted, [1, 3], [2, 4], [16, 3])
    assert all(torch.equal(got, right) for got, right in zip(pools, wanted, strict=True))
