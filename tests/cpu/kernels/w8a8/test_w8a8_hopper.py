"""Products in e4m3 on Hopper without a GPU: emulated on the host, against float64.

Not shown: how fast they are, clusters, that copies and products are ordered as on a GPU.
"""

from __future__ import annotations

import ctypes
import dataclasses
import pathlib
from types import SimpleNamespace

import pytest
import quantised_case as case
import torch
from emulation import emulated_gemm_sources, emulated_library, emulated_sources

from quire.kernels import hopper_rows
from quire.kernels.gemm import LinearShape
from quire.kernels.gemm.hopper_product import Build, variant_of
from quire.kernels.gemm.plan import Plan, ProductShape
from quire.kernels.gemm.wide import WidePlan
from quire.kernels.norm import reference as norm_reference
from quire.kernels.w8a8 import builds, hopper, reference
from quire.kernels.w8a8.plan import CodedPlan

FEW = Plan(cluster=1, groups=2, turns=True, resident=True, n_clusters=2, n_stages=3)
TRAVELS = dataclasses.replace(FEW, resident=False)


@dataclasses.dataclass(frozen=True)
class One:
    """m, n, k; the plan; scales of w; cells of x that a thread rounds within the product."""

    shape: tuple[int, int, int]
    plan: Plan | WidePlan
    scales: str = "channel"
    rounds: int = 0
    norm: bool = False
    silu: bool = False
    residual: bool = False


ALL = [
    One((3, 328, 768), FEW, residual=True),
    One((2, 208, 512), FEW, "blocks", norm=True, silu=True),
    One((3, 328, 768), FEW, rounds=1, residual=True),
    One((2, 208, 2176), FEW, "tensor", rounds=2, norm=True, silu=True),
    One((20, 144, 640), TRAVELS, norm=True),
    One((150, 80, 256), WidePlan(256, 1, n_teams=1, n_together=1), silu=True),
    One((140, 72, 256), WidePlan(256, 1, n_teams=2, n_together=1), "blocks", residual=True),
    One((150, 400, 640), WidePlan(192, 1, n_teams=3, n_together=1), "blocks"),
    One((70, 464, 1152), WidePlan(64, 1, n_teams=2, n_together=2), "blocks", silu=True),
    One((150, 400, 640), WidePlan(128, 1, n_teams=2, n_together=1, rows=192), "blocks", residual=True),
    One((150, 448, 640), WidePlan(128, 1, n_teams=1, n_together=2, rows=192), "blocks", silu=True),
]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return emulated_gemm_sources(tmp_path_factory.mktemp("sources"))


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = emulated_sources(tmp_path_factory.mktemp("rows"))
    return emulated_library(folder / "rows.cu", "rows", "-DQUIRE_BF16=1")


@pytest.mark.parametrize("one", ALL, ids=str)
def test_it_matches_float64(
    one: One, sources: pathlib.Path, rows: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(hopper_rows, "obstacle", lambda dtype: None)
    monkeypatch.setattr(hopper_rows, "launch", lambda name, x, args: getattr(rows, name)(ctypes.byref(args), None))
    m, n, k = one.shape
    x, weight = case.rows(m, k, torch.bfloat16), case.fp8(n, k, one.scales)
    norm = (torch.rand(k).add_(0.5).bfloat16(), 1e-5) if one.norm else None
    residual = torch.randn(m, n).bfloat16() if one.residual else None
    product = ProductShape(m, n, k // 2, silu=one.silu)
    made = CodedPlan(product, one.plan, one.rounds, one.norm)
    build = Build(torch.bfloat16, one.residual, False, False, 2 if one.scales == "blocks" else 1)
    source, definitions = variant_of(product, one.plan, build, made.codes)
    library = emulated_library(sources / source, f"{source}{ALL.index(one)}", *definitions)
    function = library.quire_gemm_wide if isinstance(one.plan, WidePlan) else library.quire_gemm
    launch = hopper.Launch(function, made)
    normed = x if norm is None else norm_reference.rms_norm(x, *norm)
    kept = None if residual is None else residual.clone()
    expected = reference.linear_fp8(normed, *weight, None, None, None, kept, one.silu, None)
    got = launch(x, *weight, None, None, norm, residual, one.silu, None)
    assert case.error(got, expected) <= reference.TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize(("scales", "alone"), [("channel", False), ("blocks", False), ("channel", True)])
def test_what_is_built_ahead_is_what_calls_ask_for(scales: str, alone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, scale = case.fp8(512, 512, scales)
    kind, asked = 2 if scales == "blocks" else 1, set()
    monkeypatch.setattr(hopper, "function_of", lambda *given: asked.add(variant_of(*given)))
    monkeypatch.setattr(hopper, "built", lambda make: make())
    monkeypatch.setattr(hopper, "n_processors_of", lambda device: 132)
    rows, around = (1, 9, 17, 300), (True, False, True, False)
    for m in rows:
        given = m, *weight.shape, torch.float16, torch.device("cuda"), kind, *around, True, True, alone
        hopper._prepared.__wrapped__(*given)
    layer = LinearShape(512, 512, norm=True, silu_mul=True, bias=True)
    wanted = set(builds.ahead(scale, None)(layer, torch.float16, rows, 132, alone))
    assert wanted == asked and len(asked) == 4
    assert any("ROUNDS" in one for _, definitions in asked for one in definitions) == (kind == 1 and not alone)
    assert builds.ahead(scale, None) is builds.ahead(scale.clone(), None), "those of a form are looked at once"
