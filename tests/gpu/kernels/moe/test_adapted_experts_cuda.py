"""Experts with adapters on a real GPU: against float64, each row by itself bit for bit, and captured."""

from __future__ import annotations

import dataclasses

import adapted_expert_case
import pytest
import torch

from quire.kernels import lora, moe
from quire.kernels.moe import reference

pytestmark = pytest.mark.gpu
SIZES = ((1, 8, 128, 2048, 768, 2), (33, 2, 8, 512, 320, 3), (300, 4, 16, 256, 96, 4))
"""Tokens, chosen experts, experts, hidden size, inner size, adapters."""


def on_gpu(stack: lora.Stack) -> lora.Stack:
    return lora.Stack(stack.a.cuda(), stack.b.cuda(), stack.ranks.cuda(), stack.blocks.cuda(), stack.sizes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_equals_float64_and_is_captured(size: tuple[int, ...], dtype: torch.dtype) -> None:
    n, k, n_experts, hidden, inner, n_places = size
    torch.manual_seed(n)
    x, weights = torch.randn(n, hidden).to(dtype), torch.rand(n, k)
    ids = torch.rand(n, n_experts).argsort(1)[:, :k].int().contiguous()
    up = (torch.randn(n_experts, 2 * inner, hidden) * hidden**-0.5).to(dtype)
    down = (torch.randn(n_experts, hidden, inner) * inner**-0.5).to(dtype)
    own = adapted_expert_case.made(n, n_places, n_experts, hidden, inner, dtype)
    own.places[-1] = 0
    expected = reference.adapted_experts(x.double(), ids, weights, up, down, own, moe.SWIGLU)
    given = [one.cuda() for one in (x, ids, weights, up, down)]
    moved = moe.ExpertAdapters(on_gpu(own.up), on_gpu(own.down), own.places.cuda())
    none = dataclasses.replace(moved, places=torch.full_like(moved.places, -1))
    got, without = (moe.adapted_experts(*given, one) for one in (moved, none))
    assert ((got.cpu().double() - expected).abs() / (1 + expected.abs())).max() <= reference.TOLERANCE[dtype]
    has = own.places >= 0
    assert torch.equal(got.cpu()[~has], without.cpu()[~has]) and not torch.equal(got, without)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = moe.adapted_experts(*given, none)
    graph.replay()
    assert torch.equal(captured, without)
    none.places.copy_(moved.places)
    graph.replay()
    assert torch.equal(captured, got)
