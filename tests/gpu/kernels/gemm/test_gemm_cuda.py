"""Linear layers on a real GPU: against float64, the same bits twice and in a graph, and which path runs."""

from __future__ import annotations

import random

import pytest
import torch
from gemm_case import Case, Inputs, error

from quire.kernels import catalog
from quire.kernels.gemm import hopper, reference
from quire.kernels.gemm.plan import ProductShape
from quire.kernels.gemm.wide import WidePlan, n_tiles

pytestmark = pytest.mark.gpu

needs_hopper = pytest.mark.skipif(catalog.hopper_obstacle() is not None, reason=str(catalog.hopper_obstacle()))
LAYERS = [Case(1, 6144, 4096, norm=True), Case(7, 4096, 4096, residual=True), Case(13, 2048, 14336, residual=True)]
LAYERS += [Case(16, 4096, 1024, norm=True, silu_mul=True), Case(33, 4096, 1024, norm=True, silu_mul=True, bias=True)]
LAYERS += [Case(64, 1024, 2048, residual=True), Case(50, 20000, 1024, wide=True), Case(64, 7168, 4096, silu_mul=True)]
LAYERS += [Case(200, 4096, 14336, residual=True), Case(300, 6144, 1024, silu_mul=True), Case(128, 1024, 3072)]
WIDE = [  # tokens of a tile, split, and what is fused
    (64, 8, {"residual": True}),
    (96, 6, {"bias": True}),
    (128, 1, {"silu_mul": True, "bias": True}),
    (128, 4, {"wide": True}),
    (192, 3, {"residual": True, "bias": True}),
    (256, 1, {"silu_mul": True, "residual": True}),
    (256, 4, {"residual": True}),
]


def random_case(draw: random.Random) -> Case:
    norm, silu_mul, residual = (draw.random() < 0.4 for _ in range(3))
    wide = not residual and draw.random() < 0.3
    n = 16 * draw.randint(1, 150)
    return Case(draw.randint(1, 64), n, 64 * draw.randint(1, 40), norm, residual, silu_mul, draw.random() < 0.3, wide)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_layers_and_random_shapes_match_float64(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    draw = random.Random(str(dtype))
    for case in [*LAYERS, *(random_case(draw) for _ in range(12))]:
        inputs = Inputs.make(case, dtype, "cuda")
        torch.cuda.synchronize()
        got = inputs.run()
        assert error(got, inputs.expected()) <= reference.TOLERANCE[dtype], case
        assert torch.equal(got, inputs.run()), case


@needs_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("tokens", "split", "fused"), WIDE)
def test_every_kind_of_wide_tile(tokens: int, split: int, fused: dict[str, bool], dtype: torch.dtype) -> None:
    """Not through the op, which takes only what is fastest."""
    torch.manual_seed(tokens + split)
    draw = random.Random(tokens * split)
    step = 16 if "silu_mul" in fused else 8
    for m in (65, 257, draw.randint(66, 600)):
        limit = 132 // split // -(-m // tokens) * 128 if split > 1 else 2000
        case = Case(m, step * draw.randint(9, limit // step), 64 * draw.randint(2 * split, 40), **fused)
        inputs = Inputs.make(case, dtype, "cuda")
        product, build = ProductShape(m, case.n, case.k, silu=case.silu_mul), inputs.build()
        tiles = n_tiles(product, tokens)
        made = WidePlan(
            tokens, split, tiles if split > 1 else min(tiles, draw.choice([3, 50, 132])), draw.randint(1, 3)
        )
        launch = hopper.load(product, made, build)
        torch.cuda.synchronize()
        got = inputs.run_with(launch).clone()
        assert error(got, inputs.expected()) <= reference.TOLERANCE[dtype], case
        for _ in range(3):
            assert torch.equal(got, inputs.run_with(launch)), case


@needs_hopper
def test_a_decoder_layer_in_a_graph_gives_the_same_bits() -> None:
    torch.manual_seed(0)
    layers = [Inputs.make(case, torch.bfloat16, "cuda") for case in LAYERS]
    torch.cuda.synchronize()
    wanted = [layer.run().clone() for layer in layers]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = [layer.run() for layer in layers]
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    for case, one, other in zip(LAYERS, got, wanted, strict=True):
        assert torch.equal(one, other), case


@needs_hopper
def test_which_path_runs() -> None:
    def reason(case: Case, dtype: torch.dtype = torch.bfloat16) -> str | None:
        return Inputs.make(case, dtype, "cuda").obstacle()

    assert reason(Case(64, 256, 512, residual=True)) is None and reason(Case(16, 256, 512, norm=True)) is None
    assert reason(Case(128, 1024, 3072, residual=True)) is None and "torch is" in str(reason(Case(256, 6144, 4096)))
    assert "at most 16 rows" in str(reason(Case(17, 256, 512, norm=True)))
    assert "multiples" in str(reason(Case(2, 256, 96)))
    assert "float32" in str(reason(Case(2, 256, 512), torch.float32))
    odd = Inputs.make(Case(2, 256, 512), torch.bfloat16, "cuda")
    odd.x = torch.randn(2, 513, device="cuda").bfloat16()[:, :512]
    torch.cuda.synchronize()
    assert "513 elements apart" in str(odd.obstacle())
    assert error(odd.run(), odd.expected()) <= reference.TOLERANCE[torch.bfloat16]
