"""Products that add adapters themselves, on a real GPU: against float64, the bits of rows, and captured."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lora_case import Case, Made

from quire.kernels import catalog, gemm, lora
from quire.kernels.invariance import rows_alone
from quire.kernels.lora import reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(catalog.hopper_obstacle() is not None, reason=str(catalog.hopper_obstacle())),
]
RANKS = ((16,), (5,), (0,), *((16,),) * 13)


@dataclasses.dataclass(frozen=True)
class One:
    k: int
    sizes: tuple[int, ...]
    n: int
    rank: int = 16
    silu: bool = False
    residual: bool = False
    bias: bool = False
    norm: bool = False


ALL = [
    One(4096, (4096, 1024, 1024), 64, norm=True),
    One(4096, (4096, 1024, 1024), 33, bias=True),
    One(4096, (4096,), 64, residual=True),
    One(4096, (14336, 14336), 64, silu=True, norm=True),
    One(14336, (4096,), 57, residual=True),
    One(4096, (4096,), 64, rank=32, residual=True),
    One(4096, (4096, 1024, 1024), 64, rank=64),
]


class Layer:
    def __init__(self, one: One, dtype: torch.dtype) -> None:
        ranks = tuple(tuple(rank * one.rank // 16 for rank in each) * len(one.sizes) for each in RANKS)
        places = tuple(-1 if row % 7 == 6 else row * 5 % 16 for row in range(one.n))
        self.one, self.made = one, Made(Case(one.k, one.sizes, ranks, places, dtype, one.norm))
        made, n = self.made, sum(one.sizes)
        stack = made.stack
        moved = (tensor.cuda() for tensor in (stack.a, stack.b, stack.ranks, stack.blocks))
        self.stack = lora.Stack(*moved, one.sizes)
        self.x, self.norm = made.x.cuda(), None if made.norm is None else (made.norm[0].cuda(), made.norm[1])
        self.w = (torch.randn(n, one.k, device="cuda") / one.k**0.5).to(dtype)
        self.bias = torch.randn(n, device="cuda").to(dtype) if one.bias else None
        torch.cuda.synchronize()

    def tiles(self, places: np.ndarray) -> lora.Tiles:
        found = self.made.tiles(places)
        return lora.Tiles(found.order.cuda(), found.tiles.cuda())

    def residual(self) -> torch.Tensor | None:
        if not self.one.residual:
            return None
        return torch.ones(self.one.n, sum(self.one.sizes), dtype=self.x.dtype, device="cuda")

    def run(self, tiles: lora.Tiles) -> torch.Tensor:
        given = (self.x, self.w, self.stack, tiles, self.bias, self.norm, self.residual(), self.one.silu, None)
        launch = lora.prepare_linear(*given)
        assert not isinstance(launch, str), launch
        return launch(*given)

    def bare(self) -> torch.Tensor:
        return gemm.linear(self.x, self.w, self.bias, norm=self.norm, residual=self.residual(), silu_mul=self.one.silu)

    def expected(self) -> torch.Tensor:
        made, x = self.made, self.x.double()
        if self.norm is not None:
            x = F.rms_norm(x, (self.one.k,), self.norm[0].double(), self.norm[1])
        y = x @ self.w.double().T + (0 if self.bias is None else self.bias.double())
        reference.add(self.x, self.stack, self.tiles(made.places), y, self.norm)
        if self.one.silu:
            gate, up = y.chunk(2, 1)
            y = F.silu(gate) * up
        residual = self.residual()
        return y if residual is None else y + residual.double()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("one", ALL, ids=str)
def test_equals_float64_and_bits_of_rows_are_their_own(one: One, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = Layer(one, dtype)
    places = layer.made.places
    y, bare, expected = layer.run(layer.tiles(places)), layer.bare(), layer.expected()
    # gate and up are rounded each, and multiply
    allowed = reference.TOLERANCE[dtype] * (3 if one.silu else 1)
    assert ((y.double() - expected).abs() / (1 + expected.abs())).max() <= allowed
    without = torch.tensor([place < 0 or not layer.made.stack.ranks[place].any() for place in places], device="cuda")
    assert torch.equal(y[without], bare[without])
    assert not any(torch.equal(y[row], bare[row]) for row in range(one.n) if not without[row])
    assert torch.equal(layer.run(layer.tiles(np.full(one.n, -1, np.int32))), bare)
    for row in (0, one.n // 2, one.n - 1):
        alone = np.full(one.n, -1, np.int32)
        alone[row] = places[row]
        assert torch.equal(layer.run(layer.tiles(alone))[row], y[row])


def test_a_captured_product_reads_what_was_sent() -> None:
    layer = Layer(ALL[0], torch.bfloat16)
    own = layer.tiles(np.full(64, -1, np.int32))
    layer.run(own)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer.run(own)
    graph.replay()
    assert torch.equal(y, layer.bare())
    sent = layer.tiles(layer.made.places)
    own.order.copy_(sent.order)
    own.tiles.copy_(sent.tiles)
    for _ in range(3):
        graph.replay()
        assert torch.equal(y, layer.run(sent))


def test_what_is_not_one_product_says_why() -> None:
    layer = Layer(ALL[2], torch.bfloat16)
    given = (layer.x, layer.w, layer.stack, layer.tiles(layer.made.places), None, None, None, False, None)
    with rows_alone():
        assert "any number of rows" in str(lora.prepare_linear(*given))
    assert "not one tile" in str(lora.prepare_linear(layer.x[:8], *given[1:]))
