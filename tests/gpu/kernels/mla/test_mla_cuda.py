"""Latent attention on a real GPU: lines into pages, and attention to them, against float64, with poisoned memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch
from latent_case import Latent, attend, check_store

from quire.kernels import catalog, mla
from quire.kernels.attention import op, reference
from quire.kernels.attention.schedule import work

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(catalog.triton_obstacle() is not None, reason=str(catalog.triton_obstacle())),
]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
DEEPSEEK = {"rank": 512, "rope": 64, "scale": 0.07, "device": "cuda"}
CASES = (
    Latent([(4096, 1), (1, 1), (777, 1), (65, 1)], n_heads=16, **DEEPSEEK),
    Latent([(2000, 4), (64, 2), (31, 3), (500, 1)], n_heads=16, **DEEPSEEK),
    Latent([(700, 700), (1500, 40), (90, 1)], n_heads=16, **DEEPSEEK),
    Latent([(900, 1), (70, 3), (129, 129)], n_heads=128, **DEEPSEEK),
    Latent([(513, 2), (400, 1)], n_heads=8, page_size=64, **DEEPSEEK),
    Latent([(1200, 1), (1100, 2), (1300, 1), (1190, 1)], n_heads=16, n_shared=1024, **DEEPSEEK),
    Latent([(50, 1), (40, 7)], n_heads=5, rank=24, rope=8, page_size=7, device="cuda"),
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n_ctas", [0, 3, 500])
def test_attention_matches_float64(dtype: torch.dtype, n_ctas: int) -> None:
    """Several rows a sequence, keys split among few and many programs, pages in random order, NaN where nothing is."""
    run = catalog.entry("attention", "latent").load().run
    for seed, case in enumerate(CASES):
        attend(dataclasses.replace(case, dtype=dtype, seed=seed), run, reference.TOLERANCE[dtype], n_ctas)


@pytest.mark.skipif(catalog.hopper_obstacle() is not None, reason=str(catalog.hopper_obstacle()))
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("n_ctas", [0, 3, 500])
def test_the_kernels_for_hopper_match_float64(dtype: torch.dtype, n_ctas: int) -> None:
    more = (
        Latent([(3000, 1), (1, 1), (129, 1)], n_heads=40, **DEEPSEEK),
        Latent([(3000, 1), (190, 1)], n_heads=24, page_size=8, **DEEPSEEK),
        Latent([(2000, 1)] * 70, n_heads=16, page_size=48, **DEEPSEEK),
        Latent([(8192, 1)], n_heads=16, **DEEPSEEK),
    )
    for seed, case in enumerate((*CASES[:-1], *more)):
        one = dataclasses.replace(case, dtype=dtype, seed=seed)
        attend(one, one_of("hopper-latent", one), reference.TOLERANCE[dtype], n_ctas)


def one_of(name: str, case: Latent) -> Callable[..., None]:
    """The implementation's `run`, which must take the case."""
    entry, plan = catalog.entry("attention", name), case.plan(case.inputs()[2])
    assert entry.obstacle(case.dtype, plan, op.Variant(case.scale), case.dtype, case.dtype) is None
    return entry.load().run


def test_the_op_runs_these_kernels(caplog: pytest.LogCaptureFixture) -> None:
    attend(dataclasses.replace(CASES[0], dtype=torch.bfloat16), op.run, reference.TOLERANCE[torch.bfloat16])
    assert "instead of the faster" not in caplog.text


def test_a_captured_launch_serves_later_plans() -> None:
    """Two steps through one graph, of other lengths; padding lines are nothing."""
    first = Latent([(300, 1), (900, 1), (40, 1)], n_heads=16, dtype=torch.bfloat16, **DEEPSEEK)
    q, pages, table, _ = first.inputs()
    rank, lse = first.rank, torch.zeros(q.shape[:2], device="cuda")
    out = torch.zeros(*q.shape[:2], rank, dtype=q.dtype, device="cuda")
    shape = {"page_size": 16, "n_q_heads": 16, "n_kv_heads": 1, "head_dim": 576, "value_dim": rank}
    bare = op.plan(np.arange(4), np.array([300, 900, 40]), np.arange(3), table, **shape)
    buffers = work.Buffers(bare, max_spans=8, span_tokens=1)

    def step(lens: list[int]) -> op.AttnPlan:
        return op.plan(np.arange(len(lens) + 1), np.array(lens), np.arange(len(lens)), table, **shape, buffers=buffers)

    variant = op.Variant(first.scale)
    plan = step([300, 900, 40])
    op.run(q, pages, pages[..., :rank], plan, variant, out, lse)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        op.run(q, pages, pages[..., :rank], plan, variant, out, lse)
    for lens in ([17, 640, 33], [300, 1], [250, 899, 40]):
        plan = step(lens)
        out.zero_()
        graph.replay()
        expected = torch.empty_like(out)
        reference.run(q, pages, pages[..., :rank], plan, variant, expected, None)
        n = len(lens)
        assert float((out[:n].float() - expected[:n].float()).abs().max()) <= 2 * reference.TOLERANCE[q.dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_lines_match_float64(dtype: torch.dtype) -> None:
    for sizes in ({}, {"n": 1, "n_heads": 128, "rank": 512, "d": 64}, {"n": 20, "n_heads": 17, "rank": 24, "d": 4}):
        check_store(mla.store, dtype, device="cuda", **sizes)
