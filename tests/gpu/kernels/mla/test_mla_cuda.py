"""Latent attention on a real GPU: lines into pages, and attention to them, against float64, with poisoned memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch
from latent_case import Latent, attend, check_ask, check_attend, check_store, check_values

from quire.kernels import catalog, gemm, mla
from quire.kernels.attention import op, reference
from quire.kernels.attention.schedule import work
from quire.kernels.mla import composed, hopper, hopper_ask, hopper_attend, hopper_values

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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_asked_and_values_match_float64(dtype: torch.dtype) -> None:
    """By torch's products, and by whatever the op chooses."""
    for one in (composed, mla):
        check_ask(one.ask, dtype, device="cuda")
        check_ask(one.ask, dtype, device="cuda", plain=128, n=600, n_heads=3, rank=512, d=64)
        check_values(one.values, dtype, device="cuda", n=600, rank=512, v=128)


@pytest.mark.skipif(catalog.hopper_obstacle() is not None, reason=str(catalog.hopper_obstacle()))
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("n", [1, 7, 16, 17, 32, 33, 64, 65, 200, 512])
def test_few_rows_around_lines_match_float64(dtype: torch.dtype, n: int) -> None:
    assert hopper.built(dtype) is None
    for n_heads in (16, 128, 5):
        line = {"rank": 512, "d": 64, "before": 8, "device": "cuda"}
        check_ask(hopper_ask.ask, dtype, plain=128, n=n, n_heads=n_heads, wide=n % 2 == 1, **line)
        check_values(hopper_values.values, dtype, n=n, n_heads=n_heads, rank=512, v=128, device="cuda")


@pytest.mark.skipif(catalog.hopper_obstacle() is not None, reason=str(catalog.hopper_obstacle()))
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("n_ctas", [0, 3, 500])
def test_values_of_lines_that_were_split_match_float64(dtype: torch.dtype, n_ctas: int) -> None:
    for seed, spans in enumerate((
        [(4096, 1)], [(60, 1)], [(4096, 1), (1, 1), (777, 1)], [(2000, 3), (64, 2), (500, 1)], [(900, 1)] * 6,
        [(900, 1)] * 20, [(250, 1)] * 30,
    )):  # fmt: skip
        for n_heads in (16, 5):
            case = Latent(spans, n_heads=n_heads, dtype=dtype, seed=seed, **DEEPSEEK)
            if len(case.inputs()[0]) <= hopper_attend.MAX_ROWS:
                check_attend(hopper_attend.attend, case, n_ctas, v=128)
            check_attend(mla.attend, case, n_ctas, v=128)


@pytest.mark.skipif(catalog.hopper_obstacle() is not None, reason=str(catalog.hopper_obstacle()))
@pytest.mark.parametrize("n", [1, 30, 200])
def test_a_chain_of_both_is_the_same_every_time(n: int) -> None:
    """As in a step: products before and behind, attention to what has just been stored, in a graph, many times. Each
    launch starts before the one before it has ended."""
    dtype, n_heads, page_size = torch.bfloat16, 16, 64
    make = torch.Generator("cuda").manual_seed(n)

    def made(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=make, device="cuda") * shape[-1] ** -0.5).to(dtype)

    x, stream, out = made(n, 2048), made(n_heads * 192 + 576, 2048) * 8, made(2048, n_heads * 128)
    matrices, norm = made(n_heads, 256, 512), torch.ones(512, dtype=dtype, device="cuda")
    angles = torch.randn(700, 32, generator=make, device="cuda")
    cos_sin, positions = torch.cat((angles.cos(), angles.sin()), 1), torch.full((n,), 639, device="cuda")
    pages = made(10 * n + 1, 1, page_size, 576)
    table = 1 + torch.arange(10 * n, dtype=torch.int32, device="cuda").view(n, 10)
    locs = table[:, 9].long() * page_size + page_size - 1
    shape = {"page_size": page_size, "n_q_heads": n_heads, "n_kv_heads": 1, "head_dim": 576, "value_dim": 512}
    plan = op.plan(np.arange(n + 1), np.full(n, 640), np.arange(n), table, **shape)

    def step(ask: Callable[..., torch.Tensor], attend: Callable[..., torch.Tensor]) -> torch.Tensor:
        y = x
        for _ in range(4):
            product = gemm.linear(y, stream)
            q, lines = product[:, : n_heads * 192].view(n, n_heads, 192), product[:, n_heads * 192 :]
            asked = ask(lines, norm, 1e-5, q, matrices[:, :128], positions, cos_sin, pages, locs)
            seen = attend(asked, pages, pages[..., :512], plan, op.Variant(0.07), matrices[:, 128:])
            y = gemm.linear(seen.flatten(1), out)
        return y

    expected = step(composed.ask, composed.attend)
    assert torch.isfinite(expected).all() and float(expected.abs().max()) > 0.0
    first = step(mla.ask, mla.attend)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step(mla.ask, mla.attend)
    error = (first.double() - expected.double()).norm() / expected.double().norm()
    assert float(error) <= 0.03
    for _ in range(50):
        got.zero_()
        graph.replay()
        assert torch.equal(got, first)
