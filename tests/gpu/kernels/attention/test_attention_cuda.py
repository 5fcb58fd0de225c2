"""Attention on a real GPU, every CUDA implementation: float64 answers, CUDA graphs, determinism, no waiting."""

from __future__ import annotations

import dataclasses
from types import ModuleType

import numpy as np
import pytest
import torch
from attention.triton.triton_case import VARIANTS as BY_HAND
from attention.triton.triton_case import Case, expected
from attention_states import random_states
from paged_case import VARIANTS, PagedCase, random_case, worst_error

from quire.kernels import catalog, gemm
from quire.kernels.attention import composed, op, reference
from quire.kernels.attention.merge import merge
from quire.kernels.attention.schedule import work
from quire.kernels.attention.schedule.plan import AttnPlan, Layout, SharedPrefix
from quire.kernels.attention.variant import Variant
from quire.kernels.qkv import rotate_and_store

pytestmark = pytest.mark.gpu

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
HOPPER_VARIANTS = ("causal", "window", "full", "soft_cap", "learned_sinks", "sigmoid", "tree_mask", "own")
"""Every variant, type and head size is a build of its own in CUDA C++, so these are fewer than Triton's."""


@pytest.fixture(params=["triton", "hopper"])
def implementation(request: pytest.FixtureRequest) -> ModuleType:
    """A module with `obstacle` and `run`."""
    entry = catalog.entry("attention", request.param)
    trouble = entry.machine_obstacle() if request.param == "hopper" else None
    if trouble:
        pytest.skip(trouble)
    return entry.load()


def attend(
    implementation: ModuleType, case: PagedCase, plan: AttnPlan, variant: Variant
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and lse of the real rows; checks that padding rows stay."""
    obstacle = implementation.obstacle(plan, variant, case.q.dtype, case.k.dtype)
    assert obstacle is None, obstacle
    out, lse = torch.full_like(case.q, 7.0).contiguous(), torch.full(case.q.shape[:2], 7.0, device="cuda")
    implementation.run(case.q, case.k, case.v, plan, variant, out, lse)
    assert (out[case.n_rows :] == 7.0).all() and (lse[case.n_rows :] == 7.0).all(), "padding rows were written"
    return out[: case.n_rows], lse[: case.n_rows]


def check(implementation: ModuleType, case: PagedCase, variant: Variant, **options: object) -> AttnPlan:
    """Against the float64 reference."""
    plan = case.plan(variant, **options)
    out, lse = attend(implementation, case, plan, variant)
    if not variant.softmax:  # there is no lse
        lse.fill_(0.0)
    wanted, wanted_lse = case.expected_state(variant)
    wanted_lse = wanted_lse if variant.softmax else torch.zeros_like(wanted_lse)
    # logits may grow with the position (ALiBi), and their float32 rounding with them
    allowed = max(reference.TOLERANCE[case.dtype], 1e-8 * max(n_keys for n_keys, _ in case.spans))
    size = wanted.abs().clamp(min=1.0)
    assert worst_error(out / size, wanted / size) <= allowed, (case, variant.program.text())
    assert worst_error(lse, wanted_lse) <= max(1e-4, 2 * allowed), (case, variant.program.text())
    return plan


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_random_batches_match_float64(dtype: torch.dtype, seed: int) -> None:
    """Every implementation that can run the case; Triton can run all but very few."""
    longest = 3000 if seed % 4 == 0 else 300
    dims, pages = [16, 24, 64, 80, 96, 128, 192, 256], (1, 3, 8, 16, 48, 128, 256)
    case, variant = random_case(seed, dtype, dims, longest, page_sizes=pages, device="cuda")
    listed = catalog.selectable("attention", "run", "cuda")
    able = [entry for entry in listed if not entry.obstacle(dtype, case.plan(variant), variant, dtype, dtype)]
    for entry in able:
        check(entry.load(), case, variant)
    assert "triton" in [entry.name for entry in able]


def test_very_long_sequences(implementation: ModuleType) -> None:
    spans = [(70000, 1), (69999, 3), (1, 1), (0, 0), (33000, 200), (17, 17)]
    case = PagedCase(spans, 16, 2, 4, 128, torch.bfloat16, device="cuda")
    for variant in (Variant(case.scale), Variant(case.scale, window=5000, n_first=4)):
        check(implementation, case, variant)


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_every_layout_and_head_size(implementation: ModuleType, dtype: torch.dtype, head_dim: int) -> None:
    spans = [(1500, 1), (700, 3), (0, 0), (300, 300), (900, 130), (40, 1)]
    for layout, page_size, group in ((Layout.PAGED, 24, 4), (Layout.RAGGED, 1, 3), (Layout.SPARSE, 16, 8)):
        case = PagedCase(spans, page_size, 2, group, head_dim, dtype, layout=layout, strided=True, device="cuda")
        check(implementation, case, Variant(case.scale))


@pytest.mark.parametrize("name", HOPPER_VARIANTS)
def test_variants(implementation: ModuleType, name: str) -> None:
    for layout, page_size, group in ((Layout.PAGED, 16, 4), (Layout.SPARSE, 32, 5)):
        spans = [(2500, 1), (600, 3), (333, 333), (900, 130), (1, 1)]
        case = PagedCase(spans, page_size, 2, group, 128, torch.bfloat16, layout=layout, device="cuda")
        check(implementation, case, VARIANTS[name](np.random.default_rng(1), case))


@pytest.mark.parametrize("name", BY_HAND)
def test_lines_cut_at_random_against_formulas_by_hand(name: str) -> None:
    """Lines that no plan would make: gathered, empty, cut at any key."""
    triton = catalog.entry("attention", "triton").load()
    for layout in Layout:
        for n_shared in (0, 48) if layout is Layout.PAGED else (0,):
            spans = [(130, 1), (90, 2), (300, 30), (64, 1)] if n_shared else [(130, 1), (9, 0), (300, 40), (99, 99)]
            case = Case(spans, layout, group=2, dtype=torch.bfloat16, n_shared=n_shared, seed=len(name)).to("cuda")
            variant, formula = BY_HAND[name](case)
            out, plan = torch.empty(case.q.shape, dtype=case.dtype, device="cuda"), case.plan()
            triton.run(case.q, case.k, case.v, plan, variant, out, None)
            wanted, _ = expected(case, variant.scale, formula)
            size = wanted.abs().clamp(min=1.0)
            error = worst_error(out[: len(wanted)].cpu() / size, wanted / size)
            assert error <= reference.TOLERANCE[case.dtype], (layout, n_shared, error)


@pytest.mark.parametrize(
    "spans", [[(16000, 1)], [(9000, 1), *[(300, 1)] * 63], [(4096, 64), (700, 700), (50, 1)]], ids=str
)
def test_llama_shapes_with_split_keys(implementation: ModuleType, spans: list[tuple[int, int]]) -> None:
    case = PagedCase(spans, 16, 8, 4, 128, torch.bfloat16, device="cuda")
    variant = Variant(case.scale)
    plan = check(implementation, case, variant)
    assert plan.work.n_merges > 0
    first, again = (attend(implementation, case, case.plan(variant), variant)[0] for _ in range(2))
    assert torch.equal(first, again), "two runs differ"


def test_shared_prefixes(implementation: ModuleType) -> None:
    spans = [(2100 + 9 * i, 1 + i % 2) for i in range(40)]
    shared = [SharedPrefix(range(40), 2048)]
    case = PagedCase(spans, 16, 2, 4, 128, torch.bfloat16, shared=shared, device="cuda")
    plan = check(implementation, case, Variant(case.scale))
    assert len(plan.work.rows) > 0, "no line was gathered"


def test_a_batch_does_not_change_its_members(implementation: ModuleType) -> None:
    spans = [(3000, 1), (500, 300), (40, 1), (1200, 1)]
    case = PagedCase(spans, 16, 2, 4, 128, torch.bfloat16, device="cuda")
    variant = Variant(case.scale)
    together, _ = attend(implementation, case, case.plan(variant, batch_invariant=True), variant)
    for i, (start, stop) in enumerate(zip(case.q_indptr, case.q_indptr[1:], strict=False)):
        q = case.q[start:stop]
        indptr, where = np.array([0, stop - start]), (case.kv_lens[i : i + 1], case.slots[i : i + 1], case.page_table)
        shape = dataclasses.asdict(case.heads)
        plan = op.plan(indptr, *where, page_size=16, **shape, variant=variant, batch_invariant=True)
        alone = torch.empty_like(q)
        implementation.run(q, case.k, case.v, plan, variant, alone, None)
        assert torch.equal(alone, together[start:stop]), i


def test_decode_in_a_cuda_graph(implementation: ModuleType) -> None:
    """One capture serves later steps of other lengths and batch sizes."""
    spans = [(5000, 1), *[(200 + i, 1) for i in range(15)]]
    case = PagedCase(spans, 16, 8, 4, 128, torch.bfloat16, device="cuda")
    variant, shape = Variant(case.scale), dataclasses.asdict(case.heads)
    buffers = work.Buffers(case.bare_plan(), max_spans=16)
    q, out = case.q.clone(), torch.empty_like(case.q)

    def plan_of(n_spans: int, cut: int) -> AttnPlan:
        kv_lens = np.maximum(case.kv_lens[:n_spans] - cut, 1)
        where = case.q_indptr[: n_spans + 1], kv_lens, case.slots[:n_spans], case.page_table
        return op.plan(*where, page_size=16, **shape, buffers=buffers)

    plan = plan_of(16, 0)
    assert implementation.obstacle(plan, variant, q.dtype, q.dtype) is None
    implementation.run(q, case.k, case.v, plan, variant, out, None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        implementation.run(q, case.k, case.v, plan, variant, out, None)
    for n_spans, cut in ((16, 0), (3, 150), (1, 4000), (16, 7)):
        planned = plan_of(n_spans, cut)
        graph.replay()
        wide = (x.double() for x in (q, case.k, case.v))
        wanted = torch.zeros(q.shape, dtype=torch.float64, device="cuda")
        reference.run(*wide, planned, variant, wanted, None)
        assert worst_error(out[:n_spans], wanted[:n_spans]) <= reference.TOLERANCE[torch.bfloat16], (n_spans, cut)


def test_rows_that_are_placed_in_a_cuda_graph(implementation: ModuleType) -> None:
    """Work for the last place of each row serves the places before it: lines that have no key yet add nothing."""
    spans = [(5000, 1), *[(200 + 60 * i, 1) for i in range(15)]]
    case = PagedCase(spans, 16, 8, 4, 128, torch.bfloat16, device="cuda")
    variant, shape = Variant(case.scale), {"page_size": 16, **dataclasses.asdict(case.heads)}
    where = case.q_indptr, case.kv_lens, case.slots, case.page_table
    buffers = work.Buffers(case.bare_plan(), max_spans=16, span_tokens=1)
    q, out = case.q.clone(), torch.empty_like(case.q)
    plan = op.plan(*where, **shape, buffers=buffers)
    assert implementation.obstacle(plan, variant, q.dtype, q.dtype) is None

    positions = torch.zeros(16, dtype=torch.int64, device="cuda")

    def step() -> None:
        plan.place(positions)
        implementation.run(q, case.k, case.v, plan, variant, out, None)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for far in (190, 5):
        behind = np.array([min(far, 40 * i) for i in range(16)], np.int32)
        op.plan(*where, **shape, buffers=buffers)
        for place in range(1, 4):
            lens = np.minimum(case.kv_lens - behind + place, case.kv_lens).astype(np.int32)
            positions.copy_(torch.from_numpy(lens.astype(np.int64) - 1))
            graph.replay()
            planned = op.plan(case.q_indptr, lens, case.slots, case.page_table, **shape)
            wanted = torch.zeros(q.shape, dtype=torch.float64, device="cuda")
            reference.run(*(x.double() for x in (q, case.k, case.v)), planned, variant, wanted, None)
            assert worst_error(out[:16], wanted[:16]) <= reference.TOLERANCE[torch.bfloat16], (far, place)


def test_spans_that_are_placed(implementation: ModuleType) -> None:
    """Spans of several rows, planned for a later place than that where they stand: up to 16 packed rows."""
    spans = [(3000, 4), *[(200 + 60 * i, 1 + i % 4) for i in range(15)]]
    case = PagedCase(spans, 16, 8, 4, 128, torch.bfloat16, device="cuda")
    variant, shape = Variant(case.scale), {"page_size": 16, **dataclasses.asdict(case.heads)}
    lengths = np.diff(case.q_indptr)
    buffers = work.Buffers(case.bare_plan(), max_spans=16, max_large=16, max_rows=len(case.q))
    q, out = case.q.clone(), torch.empty_like(case.q)
    for far in (0, 3, 170):
        plan = op.plan(case.q_indptr, case.kv_lens, case.slots, case.page_table, **shape, buffers=buffers)
        lens = (case.kv_lens - np.minimum(far, 11 * np.arange(16))).astype(np.int32)
        starts = np.repeat(lens - lengths - case.q_indptr[:-1], lengths)
        plan.place(torch.from_numpy(starts + np.arange(len(starts), dtype=np.int64)).cuda())
        assert implementation.obstacle(plan, variant, q.dtype, q.dtype) is None
        implementation.run(q, case.k, case.v, plan, variant, out, None)
        planned = op.plan(case.q_indptr, lens, case.slots, case.page_table, **shape)
        wanted = torch.zeros(q.shape, dtype=torch.float64, device="cuda")
        reference.run(*(x.double() for x in (q, case.k, case.v)), planned, variant, wanted, None)
        n = int(case.q_indptr[-1])
        assert worst_error(out[:n], wanted[:n]) <= reference.TOLERANCE[torch.bfloat16], far


@pytest.mark.parametrize("n_spans", [3, 40])
def test_only_settled_keys_are_read_before_the_previous_kernel_has_ended(n_spans: int) -> None:
    """The newest keys and values are NaN until a dependent launch stores them, itself behind a long product."""
    lens = np.arange(n_spans, dtype=np.int32) * 37 + 65
    n_columns = -(-int(lens.max()) // 16)
    table = torch.randperm(n_spans * n_columns, device="cuda").to(torch.int32).view(n_spans, n_columns)
    k, v = torch.randn(2, n_spans * n_columns, 8, 16, 128, device="cuda").bfloat16()
    positions = torch.from_numpy(lens - 1).cuda().long()
    pages = table[torch.arange(n_spans, device="cuda"), positions // 16].long()
    cos_sin = torch.randn(int(lens.max()), 128, device="cuda")
    x, w = torch.randn(n_spans, 4096, device="cuda").bfloat16(), torch.randn(32768, 4096, device="cuda").bfloat16()
    sizes = {"page_size": 16, "n_q_heads": 16, "n_kv_heads": 8, "head_dim": 128}
    indptr, slots = np.arange(n_spans + 1, dtype=np.int32), np.arange(n_spans, dtype=np.int32)
    early, late = (op.plan(indptr, lens, slots, table, **sizes, settled=settled) for settled in (True, False))
    for _ in range(20):
        k[pages, :, positions % 16] = torch.nan
        v[pages, :, positions % 16] = torch.nan
        qkv = gemm.linear(x, w)[:, :4096].contiguous() if n_spans == 3 else gemm.linear(x, w[:4096])
        q = rotate_and_store(qkv, None, None, 1e-6, positions, cos_sin, k, v, pages * 16 + positions % 16)
        out = op.run(q, k, v, early, Variant(128**-0.5))
        torch.cuda.synchronize()
        assert torch.equal(out, op.run(q, k, v, late, Variant(128**-0.5))) and out.isfinite().all()


def test_nothing_waits_for_the_device(implementation: ModuleType) -> None:
    case = PagedCase([(3000, 1), (500, 300), (40, 1)], 16, 2, 4, 128, torch.bfloat16, device="cuda")
    variant, out = Variant(case.scale), torch.empty_like(case.q)
    attend(implementation, case, case.plan(variant), variant)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        implementation.run(case.q, case.k, case.v, case.plan(variant), variant, out, None)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_fp8_keys_and_values() -> None:
    fp8, triton = torch.float8_e4m3fn, catalog.entry("attention", "triton").load()
    for layout in Layout:
        case = PagedCase(
            [(900, 1), (300, 200)], 16, 2, 4, 128, torch.bfloat16, layout=layout, kv_dtype=fp8, device="cuda"
        )
        check(triton, case, Variant(case.scale))


def test_steps_of_other_sizes_compile_nothing_new() -> None:
    """The arrays of a work list are views of one buffer: their alignment differs from step to step."""
    triton = catalog.entry("attention", "triton").load()
    sizes = []
    for n in (1, 2, 3, 5, 8):
        spans = [(300 + 7 * i, 1 + 40 * (i % 2)) for i in range(n + 1)]
        case = PagedCase(spans, 16, 2, 4, 64, torch.float16, device="cuda")
        attend(triton, case, case.plan(), Variant(0.1))
        kernels = (triton.kernels.small, triton.kernels.large)
        sizes.append([sum(len(cache[0]) for cache in kernel.device_caches.values()) for kernel in kernels])
    assert sizes[0] == sizes[-1], sizes


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "shape"), [(1, (3, 2, 64)), (2, (4096, 32, 128)), (4, (37, 3, 80)), (3, (5, 16, 512))])
def test_states_are_joined(n: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    outs, lses = random_states(n, shape, dtype, "cuda")
    out, lse = merge(outs, lses)
    right, right_lse = composed.merge(outs.double(), lses)
    assert out.dtype == dtype and worst_error(out, right) <= reference.TOLERANCE[dtype]
    assert bool(((lse == right_lse) | ((lse - right_lse).abs() < 1e-4)).all())
    assert all(torch.equal(*pair) for pair in zip(merge(list(outs), list(lses)), (out, lse), strict=True))
