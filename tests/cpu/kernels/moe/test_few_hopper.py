"""The kernel of experts for few rows on Hopper without a GPU: emulated on host threads, against float64, experts
floating and in codes.

Not shown: how fast it is, blocks that wait for one another, that copies are ordered as on a GPU.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import pathlib
import shutil
import subprocess
from types import SimpleNamespace

import pytest
import torch
from coded_experts import CODINGS, Coding, wide

from quire.config.experts import Gating
from quire.kernels import jit, moe
from quire.kernels.moe import hopper, reference
from quire.kernels.moe.plan import ExpertsShape, FewPlan, plan

EMULATED = pathlib.Path(__file__).resolve().parents[1] / "emulated"
FLAGS = ("-std=c++20", "-O1", "-w", "-fPIC", "-shared", "-fno-strict-aliasing", "-pthread", "-x", "c++")
SHARED = "extern __shared__ __align__(1024) char shared[];"
CLAMPED = Gating(slope=1.702, offset=1.0, limit=1.0)


@dataclasses.dataclass(frozen=True)
class One:
    n: int
    dtype: torch.dtype
    coding: Coding | None
    gating: Gating = moe.SWIGLU


CASES = [  # a lone row and several; each kind of codes and of scales
    One(1, torch.bfloat16, None, CLAMPED),
    One(4, torch.bfloat16, CODINGS[1], CLAMPED),
    One(1, torch.float16, CODINGS[2]),
    One(4, torch.float16, CODINGS[3], CLAMPED),
    One(1, torch.bfloat16, CODINGS[4]),
    One(4, torch.bfloat16, CODINGS[6]),
]


@pytest.fixture
def emulation(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = jit.compiler("c++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    folder = tmp_path / "cuda"
    shutil.copytree(jit.sources_folder() / "cuda", folder)
    for header in EMULATED.glob("*.h"):
        shutil.copy(header, folder)
    (folder / "gemm" / "codes.h").write_text('#include "../gemm.h"')
    source = folder / "moe_few.cu"
    assert SHARED in source.read_text()
    source.write_text(source.read_text().replace(SHARED, "char* shared = emulated::memory;"))

    @functools.cache
    def function(name: str, definitions: tuple[str, ...]) -> ctypes.CDLL:
        made = tmp_path / f"{abs(hash(definitions))}.so"
        command = [compiler, *FLAGS, f"-I{folder}", *definitions, str(folder / name), "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        return ctypes.CDLL(str(made)).quire_moe_few

    monkeypatch.setattr(hopper, "_function", function)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))




@pytest.mark.parametrize("one", CASES, ids=str)
def test_few_rows_match_float64(emulation: None, one: One, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    k, n_experts, hidden, inner = 2, 3, 576, 64
    coding = one.coding
    x, biases = torch.randn(one.n, hidden).to(one.dtype), (None, None)
    if one.gating is CLAMPED:
        biases = torch.randn(n_experts, 2 * inner).to(one.dtype), torch.randn(n_experts, hidden).to(one.dtype)
    if coding is None:
        up, down = torch.randn(n_experts, 2 * inner, hidden) * 0.04, torch.randn(n_experts, hidden, inner) * 0.1
        up, down = up.to(one.dtype), down.to(one.dtype)
        numbers = [up.double(), down.double()]
    else:
        sizes = ((2 * inner, hidden), (hidden, inner))
        up, down = (coding.matrices(n_experts, *size, one.dtype) for size in sizes)
        numbers = [wide(up), wide(down)]
    ids = torch.rand(one.n, n_experts).argsort(1)[:, :k].int().contiguous()
    weights, residual = torch.rand(one.n, k), torch.randn(one.n, hidden).to(one.dtype)
    shape = ExpertsShape(one.n, k, n_experts, hidden, inner, hopper._codes(down))
    cut = plan(shape)
    assert isinstance(cut, FewPlan) and cut.lone == (one.n == 1)
    products = tuple(hopper._function(*each) for each in hopper.variants(cut, one.dtype, shape.codes))
    each: list[torch.Tensor] = []
    monkeypatch.setattr(hopper._Call, "_sum", lambda self, found, slots: each.append(found))
    launch = hopper.Launch(products, SimpleNamespace(), cut, n_blocks=1)
    got = launch(x, ids, weights, up, down, one.gating, *biases, residual=residual.clone())
    if not cut.lone:  # what is left to moe_rows.cu
        got = residual.double() + (each[0].view(one.n, k, hidden).double() * weights[:, :, None]).sum(1)
    wanted = reference.experts(
        x.double(), ids, weights, *numbers, one.gating, *(None if b is None else b.double() for b in biases),
        residual=residual.double(),
    )  # fmt: skip
    error = float(((got.double() - wanted).abs() / (1 + wanted.abs())).max())
    assert error <= reference.TOLERANCE[one.dtype], error
