"""The kernels of experts on Hopper without a GPU: emulated on host threads, against float64.

Not shown: how fast they are, blocks that wait for one another, that copies and products are ordered as on a GPU; many
rows of floating experts, where lanes of a warp go on together without being told.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import math
import pathlib
import re
import shutil
import subprocess
from types import SimpleNamespace
from typing import Any

import pytest
import shared_cases
import torch
from coded_experts import CODINGS, Coding, wide

from quire.config.experts import Gating
from quire.kernels import jit, moe
from quire.kernels.moe import hopper, hopper_shared, reference
from quire.kernels.moe.plan import ExpertsShape, FewPlan, WidePlan, plan

EMULATED = pathlib.Path(__file__).resolve().parents[1] / "emulated"
FLAGS = ("-std=c++20", "-O1", "-w", "-fPIC", "-shared", "-fno-strict-aliasing", "-pthread", "-x", "c++")
STORES = re.compile(r"__device__ __forceinline__ void store_box.*?(?=struct Place)", re.DOTALL)
SHARED = "extern __shared__ __align__(1024) char shared[];"
CLAMPED = Gating(slope=1.702, offset=1.0, limit=1.0)


@dataclasses.dataclass(frozen=True)
class One:
    n: int
    dtype: torch.dtype
    coding: Coding | None
    gating: Gating = moe.SWIGLU
    wide_tokens: int = 0
    """Of the kernel for many rows; 0: the one for few."""


CASES = [  # a lone row and several; each kind of codes and of scales
    One(1, torch.bfloat16, None, CLAMPED),
    One(4, torch.bfloat16, CODINGS[1], CLAMPED),
    One(1, torch.float16, CODINGS[2]),
    One(4, torch.float16, CODINGS[3], CLAMPED),
    One(1, torch.bfloat16, CODINGS[4]),
    One(4, torch.bfloat16, CODINGS[6]),
    One(3, torch.bfloat16, CODINGS[2], CLAMPED, wide_tokens=64),
    One(3, torch.float16, CODINGS[3], wide_tokens=64),
    One(70, torch.bfloat16, CODINGS[6], wide_tokens=128),
    One(3, torch.float16, CODINGS[0], CLAMPED, wide_tokens=64),
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
    for name in ("moe_few.cu", "moe_wide.cu"):
        text = (folder / name).read_text()
        assert SHARED in text
        text = text.replace(SHARED, "char* shared = emulated::memory;")
        (folder / name).write_text(STORES.sub("", text))

    @functools.cache
    def function(name: str, definitions: tuple[str, ...]) -> ctypes.CDLL:
        made = tmp_path / f"{abs(hash(definitions))}.so"
        command = [compiler, *FLAGS, f"-I{folder}", *definitions, str(folder / name), "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        return getattr(ctypes.CDLL(str(made)), f"quire_{name.removesuffix('.cu')}")

    monkeypatch.setattr(hopper, "_function", function)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))


def view(address: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """What lies there."""
    memory = (ctypes.c_char * (math.prod(shape) * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).view(*shape)


class Rows:
    """In place of moe_rows.cu, whose work is not shown here."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def quire_moe_sort(self, given: Any, stream: object) -> int:
        args = given._obj
        ids = view(args.expert_ids, torch.int32, args.n_pairs).tolist()
        order = sorted(range(args.n_pairs), key=lambda pair: (ids[pair], pair))
        slots, tiles, first = view(args.ranks, torch.int32, args.n_pairs), [], 0
        for slot, pair in enumerate(order):
            slots[pair] = slot
        for expert in range(args.n_experts):
            end = first + ids.count(expert)
            while first < end:
                n = min(args.tile_slots, end - first)
                tiles.append([expert, first, n, 0])
                first += n
        view(args.tiles, torch.int32, len(tiles), 4).copy_(torch.tensor(tiles))
        view(args.n_tiles, torch.int32, 1).fill_(len(tiles))
        return 0

    def quire_moe_spread(self, given: Any, stream: object) -> int:
        args = given._obj
        n_pairs = args.n_tokens * args.n_chosen
        x, slots = view(args.x, self.dtype, args.n_tokens, args.h), view(args.slots, torch.int32, n_pairs)
        view(args.sorted, self.dtype, n_pairs, args.h)[slots.long()] = x.repeat_interleave(args.n_chosen, 0)
        return 0

    def quire_moe_sum(self, given: Any, stream: object) -> int:
        args = given._obj
        n, k, h, routed = args.n_tokens, args.n_chosen, args.h, args.n_chosen - args.n_shared
        x, weights = view(args.x, self.dtype, n * k, h).float(), view(args.weights, torch.float32, n, routed)
        ids = view(args.expert_ids, torch.int32, n, routed)
        x.view(n, k, h)[:, :routed][ids < 0] = 0
        weights = torch.cat([weights.masked_fill(ids < 0, 0), torch.ones(n, args.n_shared)], 1)
        if args.slots:
            x = x[view(args.slots, torch.int32, n * k).long()]
        total = view(args.residual, self.dtype, n, h) + (x.view(n, k, h) * weights[:, :, None]).sum(1)
        view(args.y, self.dtype, n, h).copy_(total)
        return 0


@pytest.mark.parametrize("one", CASES, ids=str)
def test_experts_match_float64(emulation: None, one: One) -> None:
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
    cut = WidePlan(one.wide_tokens) if one.wide_tokens else plan(shape)
    assert one.wide_tokens or (isinstance(cut, FewPlan) and cut.lone == (one.n == 1))
    products = tuple(hopper._function(*each) for each in hopper.variants(cut, one.dtype, shape.codes))
    launch = hopper.Launch(products, Rows(one.dtype), cut, n_blocks=1)
    wanted = reference.experts(
        x.double(), ids, weights, *numbers, one.gating, *(None if b is None else b.double() for b in biases),
        residual=residual.double(),
    )  # fmt: skip
    got = launch(x, ids, weights, up, down, one.gating, *biases, residual=residual)
    error = float(((got.double() - wanted).abs() / (1 + wanted.abs())).max())
    assert error <= reference.TOLERANCE[one.dtype], error


@pytest.mark.parametrize("shape", shared_cases.SHAPES, ids=str)
def test_what_all_tokens_share_is_read_as_experts(emulation: None, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if shape[0] == 1 else torch.float16
    given = shared_cases.arguments(shape, dtype)
    x, ids, weights, up, down, *shared, residual = given
    wanted = shared_cases.expected(*given)
    cut = plan(hopper.shape_of(ids, down, shape[5]))
    assert isinstance(cut, FewPlan) and cut.lone == (shape[0] == 1) and cut.tokens >= shape[0]
    products = tuple(hopper._function(*each) for each in hopper.variants(cut, dtype))
    launch = hopper_shared.SharedLaunch(hopper.Launch(products, Rows(dtype), cut, n_blocks=1))
    got = launch(x, ids, weights, up, down, *shared, residual)
    assert got is residual and shared_cases.error(got, wanted) <= reference.TOLERANCE[dtype]


def test_when_they_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def why(shape: tuple[int, ...], parts: int = 0) -> str | None:
        x, ids, weights, up, down, shared_up, shared_down, residual = shared_cases.arguments(shape, torch.bfloat16)
        size = parts or shared_down.shape[1]
        return hopper_shared.static_obstacle(
            x, ids, weights, up, down, shared_up[: 2 * size], shared_down[:, :size], residual
        )

    assert why((8, 2, 3, 64, 64, 2)) is None
    assert isinstance(why((9, 2, 3, 64, 64, 2)), hopper_shared.Slower)
    assert "not a multiple of an expert's 64" in str(why((2, 2, 3, 64, 64, 2), parts=96))
    assert "at most 32" in str(why((1, 31, 40, 64, 64, 2)))
