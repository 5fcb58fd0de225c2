"""Linear layers of 8 bits on a real GPU: against float64, rows alone, in a graph, and each kind of tile."""

from __future__ import annotations

import pytest
import quantised_case as case
import torch

from quire.kernels import catalog, w8a8
from quire.kernels.gemm.hopper import Build, function_of
from quire.kernels.gemm.plan import ProductShape
from quire.kernels.gemm.wide import WidePlan, n_tiles
from quire.kernels.invariance import rows_alone
from quire.kernels.w8a8 import hopper, reference, triton

pytestmark = pytest.mark.gpu

needs_hopper = pytest.mark.skipif(catalog.hopper_obstacle() is not None, reason=str(catalog.hopper_obstacle()))
DTYPES = (torch.bfloat16, torch.float16)
ROWS = (*range(1, 18), 33, 64, 65, 257)
SHAPES = ((4096, 1024), (1040, 3072), (576, 7168), (200, 392), (37, 130))
"""The first three are for the Hopper kernels."""


def poison() -> None:
    """Leaves NaN, of floats and of codes, where the next tensors will lie."""
    del [torch.full((16 << 20,), -1, dtype=torch.int8, device="cuda") for _ in range(4)][:]
    torch.full((64 << 20,), -1, dtype=torch.int8, device="cuda")


def compare(function, oracle, x: torch.Tensor, weight: tuple[object, ...], around: case.Around) -> None:
    poison()
    got, again = (function(x, *weight, *around.own().arguments) for _ in range(2))
    expected = oracle(x, *weight, *around.own().arguments)
    assert case.error(got, expected) <= reference.TOLERANCE[x.dtype], (x.shape, around.silu_mul)
    assert torch.equal(got, again)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("scales", ["tensor", "channel", "blocks"])
def test_e4m3_matches_float64(scales: str, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    n, k = shape
    dtype = DTYPES[SHAPES.index(shape) % 2]
    weight = case.fp8(n, k, scales, "cuda")
    x_scale = torch.tensor([0.02], device="cuda") if scales == "tensor" and n % 16 else None
    for m in ROWS:
        x = case.rows(m, k, dtype, "cuda")
        every = list(case.arounds(m, n, k, x))
        aside = [function for function in (triton.linear_fp8,) if m % 16 < 2]
        for function in (op_fp8, *aside):
            compare(function, reference.linear_fp8, x, (*weight, x_scale), every[m % len(every)])
    if shape in SHAPES[:3] and catalog.hopper_obstacle() is None:
        assert isinstance(hopper.prepare(x, *weight, x_scale, *every[0].arguments), hopper.Launch)


def op_fp8(x, weight, weight_scale, x_scale, bias, norm, residual, silu_mul, out):
    return w8a8.linear_fp8(
        x, weight, weight_scale, bias, x_scale=x_scale, norm=norm, residual=residual, silu_mul=silu_mul, out=out
    )


def op_int8(x, weight, weight_scale, x_scale, bias, norm, residual, silu_mul, out):
    return w8a8.linear_int8(x, weight, weight_scale, bias, norm=norm, residual=residual, silu_mul=silu_mul, out=out)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_integers_match_float64(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for n, k in ((256, 1024), (37, 130)):
        weight = case.int8(n, k, "cuda")
        for m in (1, 5, 16, 17, 64, 257):
            x = case.rows(m, k, dtype, "cuda")
            every = list(case.arounds(m, n, k, x))
            compare(op_int8, reference.linear_int8, x, (*weight, None), every[m % len(every)])


@pytest.mark.parametrize("scales", ["channel", "blocks"])
def test_a_row_alone_has_the_same_bits(scales: str) -> None:
    torch.manual_seed(0)
    for n, k in SHAPES[1:4]:
        weight = case.fp8(n, k, scales, "cuda")
        x = torch.randn(600, k, device="cuda", dtype=torch.bfloat16)
        with rows_alone():
            whole = w8a8.linear_fp8(x, *weight)
            for m in (1, 2, 8, 9, 16, 17, 33, 64, 65, 200):
                assert torch.equal(w8a8.linear_fp8(x[:m], *weight), whole[:m]), (n, k, m)


def test_captured_it_takes_what_x_becomes() -> None:
    torch.manual_seed(0)
    for n, k in SHAPES[1:4]:
        weight = case.fp8(n, k, "blocks", "cuda")
        for m in (3, 130):
            x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
            w8a8.linear_fp8(x, *weight)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                got = w8a8.linear_fp8(x, *weight)
            for _ in range(3):
                x.normal_()
                graph.replay()
                assert torch.equal(got, w8a8.linear_fp8(x, *weight))


@needs_hopper
@pytest.mark.parametrize("kind", [1, 2])
@pytest.mark.parametrize(("tokens", "split"), [(64, 4), (96, 1), (128, 2), (192, 1), (192, 3)])
def test_every_kind_of_wide_tile(tokens: int, split: int, kind: int) -> None:
    """Not through the op, which takes only what is fastest."""
    torch.manual_seed(0)
    for m, n, k, silu in ((65, 208, 1024, True), (257, 640, 1152, False)):
        weight = case.fp8(n, k, "blocks" if kind == 2 else "channel", "cuda")
        product = ProductShape(m, n, k // 2, silu=silu)
        tiles = n_tiles(product, tokens)
        made = WidePlan(tokens, split, tiles if split > 1 else min(tiles, 3), 2)
        function = function_of(product, made, Build(torch.bfloat16, False, silu, False, kind))
        launch = hopper.Launch(function, product, made)
        x = case.rows(m, k, torch.bfloat16, "cuda")
        bias = torch.randn(n, device="cuda").bfloat16() if silu else None
        compare(launch, reference.linear_fp8, x, (*weight, None), case.Around(bias, None, None, silu, None))
