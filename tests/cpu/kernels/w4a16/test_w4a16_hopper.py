"""Products of 4-bit codes on Hopper without a GPU: emulated on the host, against float64.

Not shown: how fast they are, clusters, that copies and products are ordered as on a GPU.
"""

from __future__ import annotations

import ctypes
import dataclasses
import pathlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import quantised_case as case
import torch
from emulation import emulated_gemm_sources, emulated_library

from quire.compute.layers.linear import Linear
from quire.compute.models.decoder import Decoder
from quire.compute.schemes.launched import Launched
from quire.compute.schemes.plain import PlainProduct
from quire.kernels import w4a16
from quire.kernels.gemm import LinearShape, ahead
from quire.kernels.gemm.hopper_product import Build, variant_of
from quire.kernels.gemm.plan import Plan, ProductShape
from quire.kernels.gemm.wide import WidePlan
from quire.kernels.w4a16 import hopper, reference
from quire.kernels.w4a16.plan import Int4Shape

FEW = Plan(cluster=1, groups=2, turns=False, resident=False, n_clusters=2, n_stages=4)
OWN = Plan(cluster=1, groups=3, turns=True, resident=False, n_clusters=2, n_stages=3)
"""Each pair of warps has rows of its own."""
PAIRED = dataclasses.replace(FEW, paired=True)


@dataclasses.dataclass(frozen=True)
class One:
    """m, n, k, group; the plan."""

    shape: tuple[int, int, int, int]
    plan: Plan | WidePlan
    dtype: torch.dtype
    zeros: bool = False
    silu: bool = False
    residual: bool = False
    bias: bool = False


ALL = [
    One((3, 328, 768, 128), FEW, torch.bfloat16, residual=True, bias=True),
    One((9, 208, 512, 32), FEW, torch.float16, zeros=True, silu=True),
    One((16, 136, 1024, 1024), FEW, torch.bfloat16, zeros=True),
    One((1, 64, 512, 64), FEW, torch.float16),
    One((3, 584, 768, 128), OWN, torch.bfloat16, residual=True, bias=True),
    One((9, 208, 512, 32), OWN, torch.float16, zeros=True, silu=True),
    One((3, 328, 768, 128), PAIRED, torch.bfloat16, residual=True, bias=True),
    One((9, 208, 1280, 32), PAIRED, torch.float16, zeros=True, silu=True),
    One((35, 208, 512, 128), WidePlan(32, 1, n_teams=2, n_together=1), torch.bfloat16, residual=True, bias=True),
    One((70, 144, 256, 32), WidePlan(64, 1, n_teams=1, n_together=2), torch.float16, zeros=True, silu=True),
]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return emulated_gemm_sources(tmp_path_factory.mktemp("sources"))


@pytest.fixture
def compiled(sources: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Callable[..., int]]:
    def function(
        product: ProductShape, plan: Plan | WidePlan, build: Build, codes: dict[str, int]
    ) -> Callable[..., int]:
        source, definitions = variant_of(product, plan, build, codes)
        name = f"{source}{abs(hash(definitions))}"
        library: ctypes.CDLL = emulated_library(sources / source, name, *definitions)
        found: Callable[..., int] = library.quire_gemm_wide if isinstance(plan, WidePlan) else library.quire_gemm
        return found

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(hopper, "function_of", function)
    return function


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("one", ALL, ids=str)
def test_it_matches_float64(one: One) -> None:
    torch.manual_seed(0)
    m, n, k, group = one.shape
    weight = case.int4(n, k, group, one.dtype, zeros=one.zeros, order=False)
    x = case.rows(m, k, one.dtype)
    bias = torch.randn(n).to(one.dtype) if one.bias else None
    residual = torch.randn(m, n).to(one.dtype) if one.residual else None
    shape = Int4Shape(m, n, k, group, one.zeros)
    launch = hopper.load(shape, one.plan, one.dtype, one.silu, one.residual, one.bias, False)
    expected = reference.linear(x, weight, bias, None, None if residual is None else residual.clone(), one.silu)
    got = launch(x, weight, bias, None, residual, one.silu, None)
    assert case.error(got, expected) <= reference.TOLERANCE[one.dtype]


@pytest.mark.usefixtures("compiled")
def test_large_activations_of_few_rows() -> None:
    """Up to what the op says: codes raised by 128 may not make more of them than float32 holds."""
    torch.manual_seed(0)
    one = next(one for one in ALL if isinstance(one.plan, Plan) and one.dtype == torch.bfloat16)
    m, n, k, group = one.shape
    codes, scales = torch.randint(0, 16, (n, k), dtype=torch.uint8), torch.full((n, k // group), 2.0**-10)
    weight = w4a16.pack(codes, scales.bfloat16(), group=group)
    for size, step, is_finite in ((1e36, 128, True), (1.5e34, 1, True), (1e35, 1, False)):
        x = torch.zeros(m, k, dtype=one.dtype)
        x[:, ::step] = size
        shape = Int4Shape(m, n, k, group, False)
        launch = hopper.load(shape, one.plan, one.dtype, False, False, False, False)
        got = launch(x, weight, None, None, None, False, None)
        expected = reference.linear(x, weight, None, None, None, False)
        assert bool(expected.isfinite().all()) and bool(got.isfinite().all()) == is_finite
        if is_finite:
            assert case.error(got, expected) <= reference.TOLERANCE[one.dtype]


@pytest.mark.parametrize("alone", [False, True])
def test_what_is_built_ahead_is_what_calls_ask_for(alone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, dtype, rows = (
        case.int4(512, 512, 64, torch.float16, zeros=True, order=False),
        torch.float16,
        (1, 9, 17, 300),
    )
    asked = set()
    monkeypatch.setattr(hopper, "function_of", lambda *given: asked.add(variant_of(*given)))
    monkeypatch.setattr(hopper, "built", lambda make: make())
    monkeypatch.setattr(hopper, "n_processors_of", lambda device: 132)
    for m in rows:
        shape = m, weight.n, weight.k, weight.group, weight.has_zeros
        around = (True, False, True, False)
        hopper._prepared.__wrapped__(*shape, dtype, torch.device("cuda"), *around, alone)
    layer = LinearShape(512, 512, silu_mul=True, bias=True)
    assert set(hopper.ahead(weight)(layer, dtype, rows, 132, alone)) == asked
    assert len(asked) == (1 if alone else 4)


def test_matrices_of_one_shape_are_built_for_in_all_their_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a checkpoint that leaves some layers in bfloat16, or has groups of several sizes."""
    built: list[tuple[str, tuple[str, ...]]] = []
    monkeypatch.setattr(ahead, "machine_obstacle", lambda: None)
    monkeypatch.setattr(ahead, "n_processors_of", lambda device: 132)
    monkeypatch.setattr(ahead, "compile_variant", lambda *variant: built.append(variant))
    shape, cuda, product = (512, 512), torch.device("cuda"), PlainProduct(torch.zeros(1))
    weights = [case.int4(*shape, group, torch.bfloat16, zeros=False, order=False) for group in (32, 128, 128)]

    def linear(product: Any) -> Any:
        found = SimpleNamespace(product=product, matrix=SimpleNamespace(n_out=shape[0], n_in=shape[1]))
        found.plain_shapes, found.coded_shapes = Linear.plain_shapes.fget(found), Linear.coded_shapes.fget(found)
        return found

    def found_for(*products: Any) -> set[tuple[str, tuple[str, ...]]]:
        built.clear()
        linears = [linear(one) for one in products]
        model: Any = SimpleNamespace(
            linears=lambda: linears, kernels=lambda: [LinearShape(*shape)], adapters=None, dtype=torch.bfloat16,
            device=cuda, layers=(),
        )  # fmt: skip
        Decoder.build_kernels(model, 64)
        assert len(built) == len(set(built))
        return set(built)

    coded = [Launched({}, max, w4a16.ahead(weight)) for weight in weights]
    assert len({one.ahead for one in coded}) == 2, "those of a form are looked at once"
    each = [found_for(one) for one in (product, *coded[:2])]
    assert all(each) and found_for(product, *coded) == each[0] | each[1] | each[2]
    assert not each[0] & each[1] and each[1] != each[2]
