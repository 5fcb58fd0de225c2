"""Attention over pages in e4m3 on a real GPU: the CUDA C++ kernels, with Triton's for large lines that are not
widened, and Triton alone, against float64 over the numbers that the codes stand for."""

from __future__ import annotations

import dataclasses
from types import ModuleType

import numpy as np
import pytest
import torch
from paged_case import VARIANTS, PagedCase, worst_error

from quire.kernels import catalog
from quire.kernels.attention import coded, op, reference, selection
from quire.kernels.attention.schedule import work
from quire.kernels.attention.schedule.plan import AttnPlan, Layout, SharedPrefix
from quire.kernels.attention.variant import Variant
from quire.kernels.e4m3 import E4M3
from quire.kernels.kvstore import entry

pytestmark = pytest.mark.gpu
SCALES = entry.Scales(0.5, 1.75)
CODES = {"kv_dtype": E4M3, "device": "cuda"}
VARIANT_NAMES = ("causal", "window", "full", "soft_cap", "learned_sinks", "sigmoid", "tree_mask", "own")
MIXED = [(2500, 1), (600, 3), (333, 333), (900, 130), (1, 1)]


@pytest.fixture(params=["triton", "hopper-e4m3"])
def implementation(request: pytest.FixtureRequest) -> ModuleType:
    """A module with `obstacle` and `run`."""
    found = catalog.entry("attention", request.param)
    trouble = found.machine_obstacle() if request.param != "triton" else None
    if trouble:
        pytest.skip(trouble)
    return found.load()


def right(case: PagedCase, plan: AttnPlan, variant: Variant) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.zeros(case.q.shape, dtype=torch.float64, device="cuda")
    lse = torch.zeros(case.q.shape[:2], dtype=torch.float64, device="cuda")
    k, v = (x.double() * scale for x, scale in zip((case.k, case.v), SCALES, strict=True))
    reference.run(case.q.double(), k, v, plan, variant, out, lse)
    return out[: case.n_rows], lse[: case.n_rows]


def check(implementation: ModuleType, case: PagedCase, variant: Variant) -> AttnPlan:
    plan = case.plan(variant)
    assert implementation.obstacle(plan, variant, case.q.dtype, case.k.dtype) is None
    out, lse = torch.full_like(case.q, 7.0).contiguous(), torch.full(case.q.shape[:2], 7.0, device="cuda")
    implementation.run(case.q, case.k, case.v, plan, variant, out, lse, SCALES)
    assert (out[case.n_rows :] == 7.0).all(), "padding rows were written"
    wanted, wanted_lse = right(case, plan, variant)
    size = wanted.abs().clamp(min=1.0)
    assert worst_error(out[: case.n_rows] / size, wanted / size) <= reference.TOLERANCE[case.dtype]
    if variant.softmax:
        assert worst_error(lse[: case.n_rows], wanted_lse) <= 1e-2
    return plan


@pytest.mark.parametrize("name", VARIANT_NAMES)
def test_variants(implementation: ModuleType, name: str) -> None:
    for layout, page_size, group in ((Layout.PAGED, 16, 4), (Layout.SPARSE, 32, 5)):
        case = PagedCase(MIXED, page_size, 2, group, 128, torch.bfloat16, layout=layout, **CODES)
        check(implementation, case, VARIANTS[name](np.random.default_rng(1), case))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_heads_and_pages(implementation: ModuleType, head_dim: int, dtype: torch.dtype) -> None:
    for group, page_size in ((1, 8), (8, 16), (12, 128), (32, 64)):
        case = PagedCase(MIXED, page_size, 2, group, head_dim, dtype, seed=group, **CODES)
        check(implementation, case, Variant(case.scale))


@pytest.mark.parametrize("spans", [[(16000, 1)], [(9000, 1), *[(300, 1)] * 63], [(4096, 64), (700, 700)]], ids=str)
def test_split_keys(implementation: ModuleType, spans: list[tuple[int, int]]) -> None:
    """Parts of both kernels are merged by one."""
    case = PagedCase(spans, 16, 8, 4, 128, torch.bfloat16, **CODES)
    assert check(implementation, case, Variant(case.scale)).work.n_merges > 0


def test_shared_prefixes(implementation: ModuleType) -> None:
    """Their part comes from a large line, the rest from small ones."""
    spans = [(2100 + 9 * i, 1 + i % 2) for i in range(40)]
    case = PagedCase(spans, 16, 2, 4, 128, torch.bfloat16, shared=[SharedPrefix(range(40), 2048)], **CODES)
    plan = check(implementation, case, Variant(case.scale))
    assert plan.work.n_large and plan.work.n_small and plan.work.n_merges


@pytest.mark.parametrize(
    ("spans", "page_size", "group", "head_dim", "window"),
    [
        ([(1024, 1024)], 16, 4, 128, 0),
        ([(3000, 500), (777, 777), *[(400, 1)] * 30], 16, 4, 128, 0),
        ([(2000, 900), (600, 600)], 48, 8, 64, 300),
        ([(900, 900)], 128, 1, 192, 0),
        ([(1500, 700), (333, 333)], 8, 5, 96, 0),
        ([(700, 700), (640, 1)], 256, 2, 256, 0),
    ],
    ids=str,
)
def test_prompts_by_the_kernel_of_wide_pages(
    spans: list[tuple[int, int]], page_size: int, group: int, head_dim: int, window: int
) -> None:
    """What large lines read is widened; small lines beside them, and parts of both."""
    found = catalog.entry("attention", "hopper-e4m3")
    if found.machine_obstacle():
        pytest.skip(str(found.machine_obstacle()))
    case = PagedCase(spans, page_size, 2, group, head_dim, torch.bfloat16, **CODES)
    plan = check(found.load(), case, Variant(case.scale, window=window))
    assert coded.widens(plan, case.k, 2)


def test_a_prefix_of_prompts_is_widened_once() -> None:
    found = catalog.entry("attention", "hopper-e4m3")
    if found.machine_obstacle():
        pytest.skip(str(found.machine_obstacle()))
    spans = [(2100 + 90 * i, 52 + 90 * i) for i in range(4)]
    case = PagedCase(spans, 16, 2, 4, 128, torch.bfloat16, shared=[SharedPrefix(range(4), 2048)], **CODES)
    assert coded.widens(check(found.load(), case, Variant(case.scale)), case.k, 2)


def test_integers_with_their_own_scales() -> None:
    """int8 entries, by Triton's kernel on every GPU."""
    module = catalog.entry("attention", "triton").load()
    for name in ("causal", "window", "rotary", "own_transforms", "sigmoid"):
        case = PagedCase(MIXED, 16, 2, 4, 128, torch.bfloat16, kv_dtype=torch.int8, device="cuda")
        variant = VARIANTS[name](np.random.default_rng(1), case)
        plan = case.plan(variant)
        assert module.obstacle(plan, variant, case.dtype, torch.int8) is None
        out = torch.full_like(case.q, 7.0).contiguous()
        module.run(case.q, case.k, case.v, plan, variant, out, None)
        wanted = case.expected_state(variant)[0]
        size = wanted.abs().clamp(min=1.0)
        assert worst_error(out[: case.n_rows] / size, wanted / size) <= 2 * reference.TOLERANCE[torch.bfloat16], name


def test_large_queries_are_cut_off_not_infinite() -> None:
    """A query of bfloat16 may be beyond fp16, in which codes are multiplied: the largest key wins all the same."""
    module = catalog.entry("attention", "hopper-e4m3")
    if module.machine_obstacle():
        pytest.skip(str(module.machine_obstacle()))
    case = PagedCase([(300, 1)], 16, 1, 4, 128, torch.bfloat16, **CODES)
    case.q[:1] *= 1e6
    out, variant = torch.empty_like(case.q), Variant(case.scale)
    module.load().run(case.q, case.k, case.v, case.plan(variant), variant, out, None, entry.UNIT)
    assert out[:1].isfinite().all()


def test_decode_in_a_cuda_graph(implementation: ModuleType) -> None:
    """One capture serves later steps of other lengths and batch sizes."""
    spans = [(5000, 1), *[(200 + i, 1) for i in range(15)]]
    case = PagedCase(spans, 16, 8, 4, 128, torch.bfloat16, **CODES)
    variant, shape = Variant(case.scale), dataclasses.asdict(case.heads)
    buffers = work.Buffers(case.bare_plan(), max_spans=16)
    out = torch.empty_like(case.q)

    def plan_of(n_spans: int, cut: int) -> AttnPlan:
        kv_lens = np.maximum(case.kv_lens[:n_spans] - cut, 1)
        where = case.q_indptr[: n_spans + 1], kv_lens, case.slots[:n_spans], case.page_table
        return op.plan(*where, page_size=16, **shape, buffers=buffers)

    plan = plan_of(16, 0)
    assert implementation.obstacle(plan, variant, case.dtype, case.k.dtype) is None
    implementation.run(case.q, case.k, case.v, plan, variant, out, None, SCALES)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        implementation.run(case.q, case.k, case.v, plan, variant, out, None, SCALES)
    for n_spans, cut in ((16, 0), (3, 150), (1, 4000), (16, 7)):
        planned = plan_of(n_spans, cut)
        graph.replay()
        wanted = right(case, planned, variant)[0][:n_spans]
        assert worst_error(out[:n_spans], wanted) <= reference.TOLERANCE[torch.bfloat16], (n_spans, cut)


def test_which_implementation_runs() -> None:
    hopper = catalog.entry("attention", "hopper-e4m3")
    case = PagedCase(MIXED, 16, 2, 4, 128, torch.bfloat16, **CODES)
    variant = Variant(case.scale)
    chosen = selection.choose(case.plan(variant), variant, case.q.device, case.dtype, case.k.dtype)
    expected = "attention.coded" if hopper.machine_obstacle() is None else "triton.launcher"
    assert chosen.__module__.endswith(expected)
    out = op.run(case.q, case.k, case.v, case.plan(variant), variant, scales=SCALES)
    assert worst_error(out[: case.n_rows], right(case, case.plan(variant), variant)[0]) < 0.03
