"""From the fused projection to queries and pages on a real GPU: against float64, and against the norm's own kernel."""

from __future__ import annotations

import pytest
import torch
from qkv_case import Shape, arguments, check, copied, random_shape

from quire.kernels.norm import rms_norm
from quire.kernels.qkv import reference, rotate_and_store

pytestmark = pytest.mark.gpu

SHAPES = [
    Shape(0, 16, 8, 128, 128),
    Shape(1, 16, 8, 128, 128),
    Shape(64, 32, 8, 128, 128, q_norm=False, k_norm=False, n_padding=60),
    Shape(300, 12, 4, 80, 20, page_size=4),
    Shape(8192, 32, 8, 128, 128, n_padding=3),
    *(random_shape(seed) for seed in range(12)),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_float64(dtype: torch.dtype, shape: Shape) -> None:
    check(rotate_and_store, shape, dtype, "cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rounds_where_the_norm_rounds(dtype: torch.dtype) -> None:
    """With a table that turns nothing, queries are what `rms_norm` makes of them, but for the order of its sum."""
    given = arguments(Shape(500, 16, 8, 128, 128), dtype, "cuda")
    still = torch.cat((torch.ones(500, 64), torch.zeros(500, 64)), dim=1).cuda()
    qkv, q_norm, _, eps, *_ = copied(given)
    q, _, _ = reference.split(qkv, given[6])
    equal = (rotate_and_store(*given[:5], still, *given[6:]) == rms_norm(q, q_norm, eps)).double().mean()
    assert float(equal) > 0.999


def test_a_graph_replays_it() -> None:
    """Captured once, it serves later rows, positions and cells that were written into the same tensors."""
    given, later = (arguments(Shape(16, 16, 8, 128, 128), torch.bfloat16, "cuda", seed) for seed in (0, 1))
    rotate_and_store(*given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        q = rotate_and_store(*given)
    for old, new in zip(given, later, strict=True):
        if isinstance(old, torch.Tensor):
            old.copy_(new)
    graph.replay()
    assert torch.equal(q, rotate_and_store(*later))
    assert torch.equal(given[6], later[6]) and torch.equal(given[7], later[7])
