"""Native CPU attention: every layout and hook against float64, and bitwise against itself."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from paged_case import PagedCase, combined, random_case, worst_error

from quire.kernels import catalog, jit, native
from quire.kernels.attention import op, reference, selection
from quire.kernels.attention.cpu import hooks as cpu_hooks
from quire.kernels.attention.cpu import launcher as cpu
from quire.kernels.attention.cpu import work
from quire.kernels.attention.schedule.plan import Layout
from quire.kernels.attention.variant import Params, Site, Variant, variants
from quire.kernels.attention.variant.expression import (
    Expr,
    Operand,
    absolute,
    as_float,
    cos,
    exp,
    log,
    maximum,
    minimum,
    rotate_half,
    sigmoid,
    sin,
    sqrt,
    tanh,
    where,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TYPES = [(dtype, kv_dtype) for dtype in DTYPES for kv_dtype in (dtype, torch.int8)]
"""Of q and out, and of k and v."""
HEAD_DIMS = [16, 33, 64, 80, 96, 128, 256]
PAGE_SIZES = (1, 3, 8, 16, 128)
LEVELS = [name for name in native.supported(native.cpu_flags()) if (native.FOLDER / f"libquire_{name}.so").exists()]

pytestmark = pytest.mark.skipif(native.library() is None, reason="no native library was built")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=LEVELS)
def built_level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each instruction-set level that was built and runs here; hooks are only compiled for the best one."""
    library = native.open_level(request.param)
    monkeypatch.setattr(native, "library", lambda: library)
    return request.param


def answer(case: PagedCase, variant: Variant, plan: object = None) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse of the real rows from cpu.run."""
    plan = plan or case.plan(variant)
    assert cpu.obstacle(plan, variant, case.q.dtype, case.k.dtype) is None
    out, lse = torch.full(case.q.shape, math.nan, dtype=case.q.dtype), torch.full(case.q.shape[:2], math.nan)
    cpu.run(case.q, case.k, case.v, plan, variant, out, lse)
    assert bool(out[case.n_rows :].isnan().all())
    return out[: case.n_rows], lse[: case.n_rows]


def check(case: PagedCase, variant: Variant, expected: tuple[torch.Tensor, torch.Tensor] | None = None) -> None:
    """Both against float64; where outputs are larger than 1, the error counts in proportion."""
    out, lse = answer(case, variant)
    wanted, wanted_lse = expected or case.expected_state(variant)
    size = wanted.abs().clamp(min=1.0)
    allowed = reference.TOLERANCE[case.dtype]
    assert worst_error(out / size, wanted / size) <= allowed, (case.layout, case.spans, case.head_dim)
    if variant.softmax:
        assert worst_error(lse, wanted_lse) <= max(allowed, 1e-5), (case.layout, case.spans, case.head_dim)


def plain_variant(seed: int, case: PagedCase) -> Variant:
    window, n_first = [(0, 0), (1, 0), (5, 3), (70, 0), (100, 200), (64, 1)][seed % 6]
    return Variant(case.scale, window=window, n_first=n_first, causal=seed % 5 != 4)


@functools.cache
def solved_case(
    seed: int, dtype: torch.dtype, kv_dtype: torch.dtype
) -> tuple[PagedCase, Variant, tuple[torch.Tensor, torch.Tensor]]:
    longest = 5000 if seed == 0 else 400
    case, _ = random_case(seed, dtype, HEAD_DIMS, longest, page_sizes=PAGE_SIZES, kv_dtype=kv_dtype)
    variant = plain_variant(seed, case)
    return case, variant, case.expected_state(variant)


@pytest.mark.parametrize(("dtype", "kv_dtype"), TYPES, ids=str)
def test_random_batches_match_float64(built_level: str, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    """Of what the pages hold: keys and values of 8 bits as they were rounded."""
    for seed in range(9):
        check(*solved_case(seed, dtype, kv_dtype))


def bent(logits: Expr, site: Site, p: Params) -> Operand:
    distance = absolute(as_float(site.q_pos - site.k_pos))
    wave = sin(logits) * cos(distance * 0.1) + sqrt(distance + p.kinds[site.k_pos % 3])
    hidden = where((site.k_pos % p.every == 1) & (site.q_pos > 5), float("-inf"), 0.0)
    return tanh(logits) * p.gain[site.q_head] - minimum(log(1.0 + distance), 3.0) + wave * 0.1 + hidden


def dilated(site: Site, p: Params) -> Operand:
    near = site.q_pos - site.k_pos < 8
    flagged = p.flags[(site.k_pos + site.q_row) // 2 % 5]
    return near | (flagged == (site.kv_head == 0)) | ~(maximum(site.k_pos, 3) != site.q_pos // p.every)


def gated(o: Expr, site: Site, p: Params) -> Operand:
    lse = where(site.lse < -1e9, 2.0, site.lse * 0.1)
    return o * sigmoid(p.gain[site.kv_head] + exp(-lse) + as_float(site.dim) / p.softness) - 0.1 * site.q_head


def own(rng: np.random.Generator, case: PagedCase) -> Variant:
    """All hooks, functions, kinds of parameters, with lanes and without."""
    floats = {"fall": 0.07, "softness": float(case.head_dim)}
    tensors = {
        "gain": case.per_head(rng).sigmoid(),
        "kinds": torch.tensor([0, 1, 4], dtype=torch.uint8),
        "shift": torch.arange(case.n_kv_heads, dtype=torch.int32),
        "flags": torch.tensor([True, False, True, True, False]),
    }
    return Variant(
        case.scale,
        query_transform=lambda x, site, p: x * p.gain[site.q_head] + rotate_half(x) * p.fall + site.q_row % 3 * 0.1,
        key_transform=lambda x, site, p: x - 0.5 * rotate_half(x) * where(site.k_pos % p.every == 0, 1.0, -1.0),
        value_transform=lambda x, site, p: x + as_float(site.dim // 3 < site.k_pos) * as_float(p.shift[site.kv_head]),
        logits_transform=bent,
        logits_mask=dilated,
        output_transform=gated,
        params={**tensors, **floats, "every": 3},
    )


def capped_masked_drained(rng: np.random.Generator, case: PagedCase) -> Variant:
    mask = torch.from_numpy(rng.random((case.n_rows, case.longest)) < 0.4)
    mask[::5] = False
    capped = variants.soft_cap(case.scale, 3.0)
    masked = combined(capped, variants.custom_mask(case.scale, mask))
    return combined(masked, variants.learned_sinks(case.scale, case.per_head(rng)))


def biased_tree(rng: np.random.Generator, case: PagedCase) -> Variant:
    ancestors = torch.from_numpy(rng.random((case.n_rows, 9)) < 0.5)
    starts = np.repeat(case.kv_lens - np.diff(case.q_indptr), np.diff(case.q_indptr)).astype(np.int32)
    tree = variants.tree_mask(case.scale, ancestors, torch.from_numpy(starts))
    return combined(variants.alibi(case.scale, case.per_head(rng).sigmoid()), tree)


def rotary(rng: np.random.Generator, case: PagedCase) -> Variant:
    dim = case.head_dim
    angles = torch.outer(torch.arange(case.longest).double(), 1e4 ** -(torch.arange(dim // 2).double() * 2 / dim))
    return variants.rotary(case.scale, torch.cat((angles.cos(), angles.sin()), dim=1).float(), 90, 4)


def sigmoids(rng: np.random.Generator, case: PagedCase) -> Variant:
    return variants.sigmoid_attention(case.scale, -math.log(case.longest))


HOOKED: dict[str, tuple[Callable[[np.random.Generator, PagedCase], Variant], torch.dtype, list[int]]] = {
    "own": (own, torch.float32, [16, 80, 96, 128]),
    "capped_masked_drained": (capped_masked_drained, torch.float16, HEAD_DIMS),
    "biased_tree": (biased_tree, torch.bfloat16, HEAD_DIMS),
    "rotary": (rotary, torch.bfloat16, [96]),
    "rotary int8": (rotary, torch.bfloat16, [96]),
    "sigmoids": (sigmoids, torch.float32, HEAD_DIMS),
}
"""Name → variant, dtype, head_dims: one compiled library each; keys of 8 bits where the name says so."""


def hooked_case(name: str, seed: int) -> tuple[PagedCase, Variant]:
    build, dtype, head_dims = HOOKED[name]
    longest, layouts = 1000 if seed == 1 else 300, (Layout(seed % 3),)
    kv_dtype = torch.int8 if name.endswith("int8") else dtype
    case, _ = random_case(seed, dtype, head_dims, longest, layouts=layouts, page_sizes=PAGE_SIZES, kv_dtype=kv_dtype)
    return case, build(np.random.default_rng(seed), case)


@pytest.fixture(scope="module")
def compiled_hooks() -> None:
    """Two compilers at a time."""
    if jit.compiler("c++") is None:
        pytest.skip("needs a C++ compiler")
    cases = [hooked_case(name, 0) for name in HOOKED]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda pair: cpu_hooks.compiled(pair[1], pair[0].dtype, pair[0].k.dtype), cases))


@pytest.mark.parametrize("name", HOOKED)
def test_hooks_match_float64(name: str, compiled_hooks: None) -> None:
    """Also with two threads and other tiles: the same bits."""
    for seed in range(9):
        case, variant = hooked_case(name, seed)
        check(case, variant)
        if seed < len(Layout):
            check_bits(case, variant)


def check_bits(case: PagedCase, variant: Variant) -> None:
    outputs = []
    with pytest.MonkeyPatch.context() as patch:
        for n_threads, tile_rows in ((1, 96), (2, 96), (2, 10)):
            patch.setattr(work, "TILE_ROWS", tile_rows)
            torch.set_num_threads(n_threads)
            outputs.append(answer(case, variant))
    torch.set_num_threads(1)
    for out, lse in outputs[1:]:
        assert torch.equal(out, outputs[0][0])
        assert torch.equal(lse, outputs[0][1])


def test_threads_and_order_of_tiles_change_nothing(built_level: str) -> None:
    spans = [(400, 150), (33, 1), (500, 1), (64, 64)]
    for layout, dtype in zip(Layout, DTYPES, strict=True):
        case = PagedCase(spans, 16, 2, 2, 64, dtype, layout=layout)
        check_bits(case, Variant(0.125, window=200, n_first=70))


@pytest.mark.parametrize(("types", "window"), list(itertools.product(TYPES, (0, 70))), ids=str)
def test_rows_do_not_depend_on_anything_else(
    built_level: str, types: tuple[torch.dtype, torch.dtype], window: int
) -> None:
    """Bitwise: neighbours, chunking, page ids, page size and place of the row change nothing."""
    variant = Variant(0.125, window=window, n_first=window // 7)
    for head_dim, group in ((64, 4), (80, 1), (128, 8)):
        prompt = PagedCase([(200, 200)], 16, 2, group, head_dim, types[0], seed=5, kv_dtype=types[1])
        whole, _ = answer(prompt, variant)
        for lengths, page_size in (([199, 1], 3), ([1, 70, 64, 65], 16), ([1] * 200, 128)):
            assert torch.equal(in_chunks(prompt, lengths, page_size, variant), whole), (head_dim, lengths)


def test_rows_with_transforms_do_not_depend_on_anything_else(compiled_hooks: None) -> None:
    prompt = PagedCase([(200, 200)], 16, 2, 2, 96, torch.bfloat16, seed=5)
    variant = rotary(np.random.default_rng(0), prompt)
    whole, _ = answer(prompt, variant)
    for lengths, page_size in (([199, 1], 3), ([1, 70, 64, 65], 16)):
        assert torch.equal(in_chunks(prompt, lengths, page_size, variant), whole), lengths


def in_chunks(prompt: PagedCase, lengths: list[int], page_size: int, variant: Variant) -> torch.Tensor:
    """The rows of `prompt` again: its keys in other pages, its tokens in chunks, each beside two random neighbours."""
    n = prompt.n_rows
    spans = [(111, 37), (n, n), (90, 1)]
    types = {"dtype": prompt.dtype, "kv_dtype": prompt.kv_dtype}
    batch = PagedCase(spans, page_size, prompt.n_kv_heads, prompt.group, prompt.head_dim, **types, seed=9)
    positions = torch.arange(n)
    source = prompt.page_table[prompt.slots[0]].long()[positions // prompt.page_size]
    target = batch.page_table[batch.slots[1]].long()[positions // page_size]
    for mine, theirs in ((batch.k, prompt.k), (batch.v, prompt.v)):
        mine[target, :, positions % page_size] = theirs[source, :, positions % prompt.page_size]
    rows = slice(37, 37 + n)
    batch.q[rows] = prompt.q[:n]
    ends = np.cumsum(lengths)
    plan = op.plan(
        np.concatenate(([0, 37], 37 + ends, [38 + n])),
        np.concatenate(([111], ends, [90])),
        np.repeat(batch.slots, (1, len(lengths), 1)),
        batch.page_table,
        page_size=page_size,
        **dataclasses.asdict(batch.heads),
        variant=variant,
    )
    return answer(batch, variant, plan)[0][rows]


def test_layouts_agree_bitwise(built_level: str) -> None:
    """Ragged rows, pages, and a list of all pages hold the same keys: the same bits."""
    paged = PagedCase([(300, 40)], 16, 2, 2, 64, torch.bfloat16, seed=3)
    variant = Variant(0.125, window=90, n_first=20)
    ragged = PagedCase([(300, 40)], 1, 2, 2, 64, torch.bfloat16, seed=3, layout=Layout.RAGGED)
    at = torch.arange(300)
    pages = paged.page_table[paged.slots[0]].long()[at // 16]
    ragged.q, ragged.k[:300], ragged.v[:300] = paged.q, paged.k[pages, :, at % 16], paged.v[pages, :, at % 16]
    blocks = (np.array([0, 19]), np.arange(19))
    listed = op.plan(
        paged.q_indptr, paged.kv_lens, paged.slots, paged.page_table, page_size=16, **dataclasses.asdict(paged.heads),
        blocks=blocks, variant=variant,
    )  # fmt: skip
    out, lse = answer(paged, variant)
    for other in (answer(ragged, variant), answer(paged, variant, listed)):
        assert torch.equal(out, other[0])
        assert torch.equal(lse, other[1])


def test_dense_attention_of_torch_agrees(built_level: str) -> None:
    """Another oracle than ours: torch's scaled_dot_product_attention."""
    case = PagedCase([(77, 77)], 1, 2, 3, 32, torch.float32, layout=Layout.RAGGED)
    q, k, v = (x[:77].transpose(0, 1).double() for x in (case.q, case.k, case.v))
    wanted = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.2, enable_gqa=True).transpose(0, 1)
    assert worst_error(answer(case, Variant(0.2))[0], wanted) < reference.TOLERANCE[torch.float32]


def test_nothing_to_see_and_nothing_to_do(built_level: str) -> None:
    """Rows without keys are 0 with lse -inf; spans without rows, and no spans at all, are fine."""
    variant = Variant(1.0, causal=False)
    for layout in (Layout.RAGGED, Layout.PAGED):
        out, lse = answer(PagedCase([(40, 0), (0, 3), (9, 2)], 16, 2, 2, 20, torch.float16, layout=layout), variant)
        assert bool((out[:3] == 0).all())
        assert bool((lse[:3] == -math.inf).all())
        assert bool((lse[3:].isfinite()).all())
    for spans in ([(40, 0), (7, 0)], []):
        assert answer(PagedCase(spans, 16, 2, 2, 16, torch.float32), Variant(1.0))[0].shape == (0, 4, 16)


def test_large_and_non_finite_scores_stay_in_their_row(built_level: str) -> None:
    """Scores of thousands do not overflow; a NaN query spoils its own row only."""
    case = PagedCase([(100, 100)], 16, 1, 2, 32, torch.float32)
    case.q[:100] *= 1000
    case.q[50, 0] = math.nan
    variant = Variant(1.0)
    got, _ = answer(case, variant)
    good = torch.ones(100, 2, dtype=torch.bool)
    good[50, 0] = False
    assert bool(got[50, 0].isnan().all())
    assert worst_error(got[good], case.expected(variant)[good]) < 1e-3


def test_cut_covers_every_token_once_and_sorts_by_cost() -> None:
    case = PagedCase([(5, 5), (9, 0), (1000, 1), (24, 24)], 8, 1, 1, 16, torch.float32)
    tiles, n_products = work.cut(case.bare_plan(), 10)
    assert tiles.tolist() == [[2, 0, 1], [3, 10, 10], [3, 0, 10], [3, 20, 4], [0, 0, 5]]
    assert n_products == 16 * (5 * 1000 + 14 * 20 + 14 * 10 + 8 * 24 + 9 * 5)
    tiles, _ = work.cut(case.bare_plan(Variant(1.0, window=4, n_first=1)), 10)
    assert tiles.tolist() == [[3, 10, 10], [3, 0, 10], [3, 20, 4], [0, 0, 5], [2, 0, 1]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": torch.float64}, "float64"),
        ({"kv_dtype": torch.float8_e4m3fn}, "float8_e4m3fn"),
        ({"head_dim": 520}, "up to 512, not 520"),
    ],
)
def test_obstacles_name_the_value(change: dict[str, object], message: str) -> None:
    case = PagedCase(**{"spans": [(5, 1)], "page_size": 8, "n_kv_heads": 1, "group": 1, "head_dim": 16,
                        "dtype": torch.bfloat16, **change})  # fmt: skip
    assert message in cpu.obstacle(case.plan(), Variant(1.0), case.q.dtype, case.k.dtype)


def test_entries_of_8_bits_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """The torch path attends to them too, and says that it runs."""
    case = PagedCase([(130, 20), (40, 1)], 16, 2, 3, 64, torch.bfloat16, kv_dtype=torch.int8)
    plan, variant = case.plan(), Variant(case.scale)
    monkeypatch.setattr(native, "library", lambda: None)
    listed = catalog.selectable("attention", "run", "cpu")
    found = {one.name: one.obstacle(torch.bfloat16, plan, variant, torch.bfloat16, torch.int8) for one in listed}
    assert found == {"cpu": native.explain(), "reference": None}
    out = torch.empty_like(case.q)
    reference.run(case.q, case.k, case.v, plan, variant, out, None)
    assert worst_error(out[: case.n_rows], case.expected(variant)) <= reference.TOLERANCE[torch.bfloat16]


def test_without_a_compiler_the_torch_path_runs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(jit, "compiler", lambda name: None)
    variant = Variant(0.3, logits_transform=lambda logits, site, p: logits * 1.25)
    case = PagedCase([(30, 12)], 8, 2, 2, 16, torch.float32)
    plan = case.plan(variant)
    assert selection.choose(plan, variant, torch.device("cpu"), case.dtype, case.dtype) is reference.run
    assert "slower torch path" in caplog.text
    assert "'c++'" in caplog.text
    got = op.run(case.q, case.k, case.v, plan, variant)[:12]
    assert worst_error(got, case.expected(Variant(0.375))) < reference.TOLERANCE[torch.float32]
