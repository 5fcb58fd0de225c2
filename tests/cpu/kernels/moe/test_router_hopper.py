"""The choice of experts in one launch, without a GPU: emulated on the host against float64, and that it compiles.

Not shown: that blocks of a cluster see what the others have stored.
"""

from __future__ import annotations

import functools
import pathlib
from types import SimpleNamespace

import pytest
import route_cases
import torch
from emulation import emulated_library, emulated_sources

from quire.config.experts import RoutingSpec, Scores
from quire.kernels import jit, moe
from quire.kernels.moe import composed, hopper_router, reference


@pytest.fixture
def emulation(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = emulated_sources(tmp_path)

    @functools.cache
    def function(dtype: torch.dtype, router_dtype: torch.dtype) -> object:
        definitions = hopper_router.definitions(dtype, router_dtype)
        return emulated_library(folder / "router.cu", f"{dtype}_{router_dtype}", *definitions).quire_router

    monkeypatch.setattr(hopper_router, "function_of", function)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))


@pytest.mark.parametrize("dtype", hopper_router.DTYPES, ids=str)
def test_the_kernel_chooses_as_the_reference(emulation: None, dtype: torch.dtype) -> None:
    cases = route_cases.ROUTERS if dtype is torch.bfloat16 else route_cases.ROUTERS[2:3]
    route_cases.check_choose(hopper_router.choose, reference.choose, cases, dtype, "cpu", 2e-6)


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
