"""The choice of experts in one launch, without a GPU: emulated on host threads against float64, and that it compiles.

Not shown: that blocks of a cluster see what the others have stored.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import pathlib
from types import SimpleNamespace

import pytest
import route_cases
import torch
from emulation import emulated_library, emulated_sources

from quire.config.experts import RoutingSpec, Scores
from quire.kernels import jit, moe
from quire.kernels.moe import ahead, composed, hopper_router, reference
from quire.kernels.moe.plan import ExpertsShape


@pytest.fixture
def emulation(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = emulated_sources(tmp_path)

    @functools.cache
    def function(dtype: torch.dtype, router_dtype: torch.dtype) -> object:
        definitions = hopper_router.definitions(dtype, router_dtype)
        library = emulated_library(folder / "router.cu", f"{dtype}_{router_dtype}", *definitions)
        library.quire_router.library = library
        return library.quire_router

    monkeypatch.setattr(hopper_router, "function_of", function)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))


@pytest.mark.parametrize("dtype", hopper_router.DTYPES, ids=str)
def test_the_kernel_chooses_as_the_reference(emulation: None, dtype: torch.dtype) -> None:
    cases = route_cases.ROUTERS if dtype is torch.bfloat16 else route_cases.ROUTERS[2:3]
    route_cases.check_choose(hopper_router.choose, reference.choose, cases, dtype, "cpu", 2e-6)


def test_rows_are_normed_before(emulation: None) -> None:
    """Rows that the previous grid writes late among them."""
    dtype = torch.bfloat16
    route_cases.check_norm_and_choose(hopper_router.norm_and_choose, route_cases.ROUTERS, dtype, "cpu", 2e-6)
    for hidden in (64, 2056):
        x, weight = torch.randn(3, hidden).to(dtype), torch.rand(hidden).to(dtype)
        given = torch.randn(8, hidden), None, RoutingSpec(n_chosen=2), None, None, (weight, 1e-5), None
        expected = hopper_router.norm_and_choose(x, *given)
        library = hopper_router.function_of(dtype, torch.float32).library
        late = torch.full_like(x, torch.nan)
        library.emulated_arrival(*(ctypes.c_void_p(one.data_ptr()) for one in (x, late)), ctypes.c_size_t(x.nbytes))
        got = hopper_router.norm_and_choose(late, *given)
        library.emulated_arrival(None, None, 0)
        assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))


SIZE = 2  # bytes of a number


def _asked(n: int, k: int, then: moe.Following) -> list[set[tuple[int, int]]]:
    """Of each matrix what is asked for of it: (bytes from its beginning, how many)."""
    up = then.up
    dtype, hidden = up.dtype, up.shape[2]
    x, router = torch.randn(n, hidden).to(dtype), torch.randn(len(up), hidden)
    hopper_router.norm_and_choose(
        x, router, None, RoutingSpec(n_chosen=k), None, None, (torch.ones(hidden).to(dtype), 1e-6), then
    )
    library = hopper_router.function_of(dtype, torch.float32).library
    found = (ctypes.c_int64 * 20000)()
    n_found = library.emulated_asked(found, ctypes.c_int64(10000))
    pairs = [(found[2 * i], found[2 * i + 1]) for i in range(n_found)]
    assert n_found == len(set(pairs)) <= 10000
    of_each = [
        {(at - one.data_ptr(), size) for at, size in pairs if 0 <= at - one.data_ptr() <= one.nbytes - size}
        for one in (up, *(then.shared or ()))
    ]
    assert sum(map(len, of_each)) == n_found, "all is of these matrices"
    return of_each


def test_what_is_asked_of_memory_ahead(emulation: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows: what all go through. More: what each of three blocks begins with, gate and up, in either kernel."""
    monkeypatch.setattr(ahead, "n_processors_of", lambda device: 3)
    up, down = torch.randn(8, 2 * 192, 64).bfloat16(), torch.randn(64, 72).bfloat16()
    both = moe.Following(up, (torch.randn(2 * 72, 64).bfloat16(), down))
    row, matrix = 64 * SIZE, 192 * 64 * SIZE
    assert _asked(2, 2, both) == [set(), {(i * row, row) for i in range(144)}, {(0, 4096), (4096, 4096), (8192, 1024)}]
    assert _asked(2, 2, moe.Following(up)) == [set()]
    monkeypatch.setattr(ahead, "BYTES", 3 * 2 * 20 * row)  # 16 rows each, whole items
    starts = [0, 64 * 8, 128 * 8]  # 192 items of 8 rows in all: of experts 0, 2 and 5
    expected = {
        ((at // 192 * 2 + half) * matrix + (at % 192 + i) * row, row)
        for at in starts for half in range(2) for i in range(16)
    }  # fmt: skip
    assert _asked(9, 2, moe.Following(up)) == [expected]
    assert not _asked(9, 2, both)[0]
    monkeypatch.setattr(ahead, "BYTES", 3 * 2 * 128 * 100 * SIZE)
    ahead._of_experts.cache_clear()
    expected = {((at // 192 * 2 + half) * matrix + at % 192 * row, row) for half in range(2) for at in range(384)}
    assert _asked(40, 2, both) == [expected, set(), set()]
    ahead._of_experts.cache_clear()


def test_experts_that_are_not_likely_to_be_read_are_not_asked_for() -> None:
    """DeepSeek-V2-Lite's 6 of 64: uniform routing touches nine tenths from 24 rows on."""
    up = torch.empty(64, 2 * 1408, 2048, dtype=torch.bfloat16, device="meta")
    shape = ExpertsShape(23, 6, 64, 2048, 1408)
    assert ahead._of_experts(shape, 132, 2) == ahead.NOTHING
    few, wide = (ahead._of_experts(dataclasses.replace(shape, n=n), 132, 2) for n in (24, 256))
    assert (few.rows, few.columns, few.step, few.items) == (16, 2048, 8, 64 * 176)
    assert (wide.rows, wide.columns, wide.step, wide.items) == (128, 320, 128, 132)
    for one in (few, wide):
        assert 2 * one.runs * one.rows * one.columns * up.element_size() <= ahead.BYTES


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_op_on_a_cpu(dtype: torch.dtype) -> None:
    def choose(x, weight, bias, routing, correction, load):
        return moe.choose(x, weight, routing, correction, load, bias=bias)

    x, weight, routing = torch.randn(7, 48).to(dtype), torch.randn(12, 48), RoutingSpec(n_chosen=3, scale=2.0)
    load = torch.zeros(12, dtype=torch.int64)
    ids, weights = choose(x, weight, None, routing, None, load)
    expected_ids, expected = reference.choose(x.double(), weight.double(), None, routing, None, None)
    assert torch.equal(ids, expected_ids) and int(load.sum()) == ids.numel()
    assert float((weights - expected).abs().max()) <= 2e-6 * 2
    assert torch.equal(composed.choose(x, weight, None, routing, None, None)[1], weights)


def test_what_the_kernel_does_not_take() -> None:
    x, weight, routing = torch.randn(4, 64).bfloat16(), torch.randn(8, 64), RoutingSpec(n_chosen=2)

    def why(x: torch.Tensor, weight: torch.Tensor, routing: RoutingSpec) -> str | None:
        return hopper_router.static_obstacle(x, weight, None, routing, None, None)

    assert why(x, weight, routing) is None
    assert "float32" in str(why(x.float(), weight, routing))
    assert "sparse_mixer" in str(why(x, weight, RoutingSpec(n_chosen=2, scores=Scores.SPARSE_MIXER)))
    assert "16 bytes" in str(why(x[:, :60], weight, routing))
    assert "at most 32 of 512" in str(why(x, torch.randn(513, 64), routing))
    assert isinstance(why(x.new_zeros(513, 64), weight, routing), hopper_router.Slower)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"router": torch.zeros(8, 60)}, "router (8, 60)"),
        ({"router": torch.zeros(8, 64).half()}, "torch.float16"),
        ({"bias": torch.zeros(7)}, "bias (7,)"),
        ({"load": torch.zeros(8)}, "load (8,)"),
    ],
)
def test_arguments_that_do_not_fit(change: dict[str, torch.Tensor], words: str) -> None:
    given = {"x": torch.zeros(2, 64), "router": torch.zeros(8, 64), "routing": RoutingSpec(n_chosen=2)} | change
    with pytest.raises(ValueError) as error:
        moe.choose(**given)
    assert words in str(error.value)


@pytest.mark.skipif(jit.compiler("nvcc") is None, reason="needs nvcc")
def test_it_compiles() -> None:
    assert hopper_router.function_of(torch.bfloat16, torch.float32) and hopper_router.function_of(
        torch.float16, torch.float16
    )
