"""Run by `test_attention_triton.py` in a process of its own: Triton reads TRITON_INTERPRET when a kernel is defined."""

from __future__ import annotations

import dataclasses

import numpy as np
import quick_interpreter  # noqa: F401
import torch
from attention_states import random_states
from paged_case import PagedCase, random_case, worst_error
from triton_case import VARIANTS, Case, expected

from quire.kernels.attention import composed, op, reference
from quire.kernels.attention.schedule import work
from quire.kernels.attention.schedule.plan import AttnPlan, Layout
from quire.kernels.attention.triton import kernels, states
from quire.kernels.attention.triton import launcher as attention
from quire.kernels.attention.variant import Variant
from quire.kernels.kvstore import entry

# A large line is taken in runs of 32 packed rows in float32: one that has a token more reaches the second run.
MIXED = [(130, 1), (9, 0), (1, 1), (300, 2), (160, 17)]
LAYOUTS = (Layout.PAGED, Layout.RAGGED, Layout.SPARSE)


def check(name: str, case: Case, with_lse: bool = True) -> None:
    """The kernels against the formula by hand."""
    variant, formula = VARIANTS[name](case)
    plan = case.plan()
    assert attention.obstacle(plan, variant, case.dtype, case.kv_dtype) is None
    out = torch.full(case.q.shape, 7.0, dtype=case.dtype)
    lse = torch.full(case.q.shape[:2], 7.0) if with_lse else None
    attention.run(case.q, case.k, case.v, plan, variant, out, lse, case.scales)
    right, right_lse = expected(case, variant.scale, formula)
    n_rows = len(right)
    error = float((out[:n_rows].double() - right).abs().max())
    # tanh is made from exp here: a soft cap of c adds up to c * 2**-23 to a logit.
    tolerance = reference.TOLERANCE[case.dtype] * max(1.0, float(right.abs().max()) / 4) + 5.0 * 2**-23 * (
        "cap" in name
    )
    assert error <= tolerance, (name, case, error)
    assert (out[n_rows:] == 7.0).all(), (name, case, "padding rows were written")
    if lse is not None:
        got = lse[:n_rows].double()
        close = (got - right_lse).abs() < (1e-4 if case.dtype == torch.float32 else 5e-3)  # transforms round keys
        assert ((got == right_lse) | close).all(), (name, case, got, right_lse)


def check_variants() -> None:
    """Every variant in every layout, cut into parts."""
    for seed, name in enumerate(VARIANTS):
        layout = LAYOUTS[seed % 3]
        check(name, Case(MIXED, layout, page_size=(16, 7)[seed % 2], seed=seed, tokens_first=seed % 2 == 0))


def check_shapes() -> None:
    """Groups, head sizes, pages and precisions that need masks, gathered lines, 8-bit keys, one token a span."""
    half, fp8 = torch.float16, torch.float8_e4m3fn
    short = [(60, 1), (150, 1), (17, 5)]
    check("causal", Case(short, page_size=1, n_kv_heads=1, group=1, head_dim=16, dtype=half), with_lse=False)
    check("causal", Case([(90, 1), (27, 27)], page_size=48, n_kv_heads=3, group=5, head_dim=24))
    check("window", Case([(200, 20), (31, 3)], page_size=256, n_kv_heads=1, group=7, head_dim=80, dtype=half))
    check("first and window", Case([(330, 1), (300, 10)], Layout.RAGGED, n_kv_heads=1, group=16, head_dim=96))
    check("sinks", Case([(140, 1), (0, 0), (20, 20)], Layout.SPARSE, page_size=8, group=8, head_dim=128, n_pieces=1))
    check("causal", Case(short, Layout.PAGED, group=4, head_dim=64, dtype=half, kv_dtype=fp8))
    coded = {"kv_dtype": fp8, "scales": entry.Scales(0.5, 1.75)}
    for name in ("causal", "everything", "rotary", "sigmoid", "sinks"):
        layout = LAYOUTS[len(name) % 3]
        check(name, Case(MIXED[:3], layout, group=4, head_dim=16, dtype=half, seed=len(name), **coded))
    check("window", Case(MIXED, group=2, head_dim=24, **coded))
    shared = [(80, 1), (70, 2), (100, 21), (64, 1)]
    for name in ("causal", "alibi", "mask", "sigmoid"):
        check(name, Case(shared, page_size=16, group=2, n_shared=48, seed=len(name)))


def check_many_parts() -> None:
    """More parts than one step of the merge takes, with keys in each."""
    for name, spans, seed in (("causal", [(400, 1), (390, 11)], 5), ("sigmoid", [(400, 2)], 1)):
        case = Case(spans, page_size=4, n_kv_heads=1, group=3, head_dim=16, n_pieces=60, seed=seed)
        assert int(case.plan().work.merges[:, 3].max()) > 2 * kernels.MERGED_AT_ONCE.value
        check(name, Case(spans, page_size=4, n_kv_heads=1, group=3, head_dim=16, n_pieces=60, seed=seed))


def attend(case: PagedCase, variant: Variant, plan: AttnPlan) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and lse of the real rows."""
    out, lse = torch.full(case.q.shape, np.nan, dtype=case.dtype), torch.full(case.q.shape[:2], np.nan)
    attention.run(case.q, case.k, case.v, plan, variant, out, lse)
    return out[: case.n_rows], lse[: case.n_rows]


def check_planned_work() -> None:
    """The lines that the library plans, on few CTAs so that much is split; the reference is the oracle."""
    n_split = 0
    cases = [random_case(i, (torch.float32, torch.float16)[i % 2], [16, 20, 64, 80], longest=90) for i in range(10)]
    split = PagedCase([(700, 1), (300, 3), (520, 2), (40, 1), (9, 0)], 32, 1, 2, 16, torch.float32)
    cases += [(split, Variant(0.25)), (split, Variant(0.25, window=90, n_first=4))]
    for case, variant in cases:
        bare = case.bare_plan(variant)
        plan = dataclasses.replace(bare, work=work.make(bare, n_ctas=8))
        if attention.obstacle(plan, variant, case.dtype, case.dtype) is not None:
            continue
        n_split += plan.work.n_merges
        right, right_lse = case.expected_state(variant)
        out, lse = attend(case, variant, plan)
        size, allowed = right.abs().clamp(min=1.0), reference.TOLERANCE[case.dtype]
        assert worst_error(out / size, right / size) <= allowed, (case, variant.program.text())
        # A query or key transform rounds its results to q's dtype.
        assert worst_error(lse, right_lse) <= max(1e-5, 2 * allowed), (case, variant.program.text())
    assert n_split > 0


def check_integers() -> None:
    """int8 entries, each with its scale, under every kind of variant; the reference reads the same entries."""
    for seed in range(12):
        dtype = (torch.float32, torch.float16)[seed % 2]
        case, variant = random_case(seed, dtype, [16, 20, 64], longest=70, kv_dtype=torch.int8)
        bare = case.bare_plan(variant)
        plan = dataclasses.replace(bare, work=work.make(bare, n_ctas=4))
        assert attention.obstacle(plan, variant, dtype, torch.int8) is None
        wanted, _ = case.expected_state(variant)
        out, _ = attend(case, variant, plan)
        size = wanted.abs().clamp(min=1.0)
        assert worst_error(out / size, wanted / size) <= 2 * reference.TOLERANCE[dtype], (case, variant.program.text())


def check_buffers() -> None:
    """One set of buffers, several decode steps: addresses and grids stay, the answers follow the plan."""
    first = PagedCase([(700, 1), (300, 3), (520, 1)], 16, 2, 2, 16, torch.float32)
    buffers = work.Buffers(first.bare_plan(), max_spans=4, n_ctas=8)
    variant = Variant(0.25)
    for case in (first, PagedCase([(9, 1)], 16, 2, 2, 16, torch.float32), first):
        plan = dataclasses.replace(case.bare_plan(), work=buffers.fill(case.bare_plan()))
        assert worst_error(attend(case, variant, plan)[0], case.expected(variant)) < 5e-6


def check_placing() -> None:
    """Rows that stand before where they were planned, so far that lines are left without keys, and then move on."""
    case, variant = PagedCase([(700, 1), (300, 1), (9, 1), (520, 1)], 16, 2, 2, 16, torch.float32), Variant(0.25)
    buffers = work.Buffers(case.bare_plan(), max_spans=6, n_ctas=8)
    shape = {"page_size": 16, "variant": variant, **dataclasses.asdict(case.heads)}
    for behind in (case.kv_lens - 1, np.array([650, 8, 8, 130]), np.array([2, 0, 1, 64])):
        plan = dataclasses.replace(case.bare_plan(), work=buffers.fill(case.bare_plan()))
        for step in range(3):
            lens = np.minimum(case.kv_lens - behind + step, case.kv_lens).astype(np.int32)
            plan.place(torch.from_numpy(lens.astype(np.int64) - 1))
            planned = op.plan(case.q_indptr, lens, case.slots, case.page_table, **shape)
            check_equal(case, variant, plan, planned)
    check_placing_spans()


def check_placing_spans() -> None:
    """The same of spans of several rows, as a step has them that verifies drafts."""
    case, variant = PagedCase([(700, 5), (300, 1), (9, 4), (520, 3)], 16, 2, 2, 16, torch.float32), Variant(0.25)
    buffers = work.Buffers(case.bare_plan(), max_spans=6, n_ctas=8, max_large=4, max_rows=64)
    shape = {"page_size": 16, "variant": variant, **dataclasses.asdict(case.heads)}
    for behind in (np.zeros(4, int), np.array([1, 4, 2, 7]), np.array([650, 8, 5, 130])):
        plan = dataclasses.replace(case.bare_plan(), work=buffers.fill(case.bare_plan()))
        lens = (case.kv_lens - behind).astype(np.int32)
        planned = op.plan(case.q_indptr, lens, case.slots, case.page_table, **shape)
        lengths = np.diff(case.q_indptr)
        starts = np.repeat(lens - lengths - case.q_indptr[:-1], lengths)
        plan.place(torch.from_numpy(starts + np.arange(case.q_indptr[-1]).astype(np.int64)))
        check_equal(case, variant, plan, planned)


def check_equal(case: PagedCase, variant: Variant, plan: AttnPlan, planned: AttnPlan) -> None:
    """A plan's results are the reference's of another."""
    wanted = torch.zeros(case.q.shape, dtype=torch.float64)
    reference.run(case.q.double(), case.k.double(), case.v.double(), planned, variant, wanted, None)
    found = attend(case, variant, plan)[0]
    assert worst_error(found, wanted[: len(found)]) < 5e-6, planned.spans.kv_lens


def check_obstacles() -> None:
    case = Case([(9, 1)])
    plan = case.plan()
    float32, half = torch.float32, torch.float16
    assert "float64" in attention.obstacle(plan, Variant(1.0), torch.float64, torch.float64)
    assert "float16" in attention.obstacle(plan, Variant(1.0), float32, half)


def check_states() -> None:
    """Rows that no block divides, widths that are no power of two, one state and several, some of which saw nothing."""
    wide, half = torch.float32, torch.float16
    for n, dtype, shape in ((1, wide, (3, 2, 24)), (2, half, (37, 3, 80)), (5, wide, (70, 1, 128))):
        outs, lses = random_states(n, shape, dtype)
        out, lse = states.merge(outs, lses)
        right, right_lse = composed.merge(outs.double(), lses)
        assert out.dtype == dtype and worst_error(out, right) <= reference.TOLERANCE[dtype], (n, dtype, shape)
        assert ((lse == right_lse) | ((lse - right_lse).abs() < 1e-4)).all() and (lse == float("-inf")).any() == (n < 5)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with np.errstate(all="ignore"):
        check_obstacles()
        check_shapes()
        check_many_parts()
        check_planned_work()
        check_integers()
        check_buffers()
        check_placing()
        check_variants()
        check_states()
    print("fine")
