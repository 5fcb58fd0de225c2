"""Products of few rows on Hopper without a GPU: emulated on the host, against float64.

Not shown: how fast they are, clusters, that copies and products are ordered as on a GPU.
"""

from __future__ import annotations

import pathlib
from types import SimpleNamespace

import pytest
import torch
from emulation import emulated_gemm_sources, emulated_library
from gemm_case import Case, Inputs, error

from quire.kernels.gemm import reference
from quire.kernels.gemm.hopper import Launch
from quire.kernels.gemm.hopper_product import variant_of
from quire.kernels.gemm.plan import Plan, ProductShape


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return emulated_gemm_sources(tmp_path_factory.mktemp("sources"))


@pytest.mark.parametrize(
    ("case", "plan"),
    [
        (Case(3, 328, 192, norm=True, residual=True), Plan(1, 3, True, True, n_clusters=2, n_stages=3)),
        (Case(20, 144, 320, bias=True, silu_mul=True), Plan(1, 2, False, False, n_clusters=1, n_stages=3)),
    ],
)
def test_it_matches_float64(case: Case, plan: Plan, sources: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))
    one = Inputs.make(case, torch.bfloat16, "cpu")
    product = ProductShape(case.m, case.n, case.k, case.norm, case.silu_mul)
    source, definitions = variant_of(product, plan, one.build())
    library = emulated_library(sources / source, f"few{case.m}", *definitions)
    got = one.run_with(Launch(library.quire_gemm, plan))
    assert error(got, one.expected()) <= reference.TOLERANCE[torch.bfloat16]
