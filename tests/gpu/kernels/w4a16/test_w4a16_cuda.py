"""Linear layers of 4 bits on a real GPU: against float64, rows alone, and in a graph."""

from __future__ import annotations

import dataclasses

import pytest
import quantised_case as case
import torch

from quire.kernels import catalog, w4a16
from quire.kernels.gemm.plan import Plan, ProductShape
from quire.kernels.gemm.wide import WidePlan, n_tiles
from quire.kernels.invariance import rows_alone
from quire.kernels.w4a16 import hopper, reference, triton
from quire.kernels.w4a16.plan import tile_rows

pytestmark = pytest.mark.gpu

DTYPES = (torch.bfloat16, torch.float16)
ROWS = (1, 13, 257)
KINDS = ((4096, 1024, 128, False), (1040, 3072, 64, True), (576, 7168, 32, False), (2048, 14336, 14336, True))
KINDS += ((256, 2048, 512, True), (200, 392, 32, True), (37, 130, 130, False))
"""n, k, group, zero points; all but the last two are for the Hopper kernels."""


def op(x, weight, bias, norm, residual, silu_mul, out):
    return w4a16.linear(x, weight, bias, norm=norm, residual=residual, silu_mul=silu_mul, out=out)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_it_matches_float64(kind: tuple[int, int, int, bool]) -> None:
    torch.manual_seed(0)
    n, k, group, zeros = kind
    dtype = DTYPES[KINDS.index(kind) % 2]
    weight = case.int4(n, k, group, dtype, zeros=zeros, order=n == 1040, device="cuda")
    for i, m in enumerate(ROWS):
        x = case.rows(m, k, dtype, "cuda")
        every = list(case.arounds(m, n, k, x))
        around = every[(i + KINDS.index(kind)) % len(every)]
        torch.full((64 << 20,), -1, dtype=torch.int8, device="cuda")  # NaN where the next tensors will lie
        expected = reference.linear(x, weight, *around.own().arguments)
        for function in (op, triton.linear) if m in (1, 257) else (op,):
            got, again = (function(x, weight, *around.own().arguments) for _ in range(2))
            assert case.error(got, expected) <= reference.TOLERANCE[dtype], (m, kind, function)
            assert torch.equal(got, again)
        if kind in KINDS[:-2] and catalog.hopper_obstacle() is None:
            assert isinstance(hopper.prepare(x, weight, *around.arguments), hopper.Launch)


@pytest.mark.skipif(catalog.hopper_obstacle() is not None, reason=str(catalog.hopper_obstacle()))
def test_a_few_rows_may_be_stored_anywhere() -> None:
    """Many may not."""
    m, n, k = 16, 4096, 14336
    weight = case.int4(n, k, 128, torch.bfloat16, zeros=False, order=False, device="cuda")
    x = case.rows(m, k, torch.bfloat16, "cuda")
    odd = torch.empty(m, n + 1, device="cuda", dtype=torch.bfloat16)[:, :n]
    assert isinstance(hopper.prepare(x, weight, None, None, None, False, odd).plan, Plan)
    expected = reference.linear(x, weight, None, None, None, False)
    assert case.error(w4a16.linear(x, weight, out=odd), expected) <= reference.TOLERANCE[torch.bfloat16]
    many = case.rows(64, k, torch.bfloat16, "cuda")
    assert "do not start" in hopper.prepare(many, weight, None, None, None, False, many.new_empty(64, n + 1)[:, :n])


def test_a_row_alone_has_the_same_bits() -> None:
    torch.manual_seed(0)
    for n, k, group, zeros in KINDS[1:3]:
        weight = case.int4(n, k, group, torch.bfloat16, zeros=zeros, order=False, device="cuda")
        x = torch.randn(200, k, device="cuda", dtype=torch.bfloat16)
        with rows_alone():
            whole = w4a16.linear(x, weight)
            for m in (1, 2, 16, 65):
                assert torch.equal(w4a16.linear(x[:m], weight), whole[:m]), (n, k, m)


@pytest.mark.skipif(catalog.hopper_obstacle() is not None, reason=str(catalog.hopper_obstacle()))
@pytest.mark.parametrize(
    ("tokens", "split", "group", "zeros", "silu"),
    [
        (32, 2, 64, True, True),
        (64, 4, 32, True, True),
        (96, 1, 128, False, False),
        (128, 2, 128, False, True),
        (192, 3, 32, True, False),
        (256, 1, 32, False, True),
    ],
)
def test_every_kind_of_wide_tile(tokens: int, split: int, group: int, zeros: bool, silu: bool) -> None:
    """Not through the op, which takes only what is fastest."""
    torch.manual_seed(0)
    for m, n, k in ((65, 208, 1024), (257, 640, 1280)):
        weight = case.int4(n, k, group, torch.bfloat16, zeros=zeros, order=False, device="cuda")
        tiles = n_tiles(ProductShape(m, n, k, silu=silu), tokens)
        made = WidePlan(tokens, split, tiles if split > 1 else min(tiles, 3), 2)
        launch = hopper.load(hopper.Int4Shape(m, n, k, group, zeros), made, torch.bfloat16, silu, False, False, False)
        x = case.rows(m, k, torch.bfloat16, "cuda")
        expected = reference.linear(x, weight, None, None, None, silu)
        got, again = (launch(x, weight, None, None, None, silu, None) for _ in range(2))
        assert case.error(got, expected) <= reference.TOLERANCE[torch.bfloat16], m
        assert torch.equal(got, again)


@pytest.mark.skipif(catalog.hopper_obstacle() is not None, reason=str(catalog.hopper_obstacle()))
@pytest.mark.parametrize(
    ("m", "cut"),
    [
        (1, Plan(1, 7, True, False, 19, 3)),
        (3, Plan(1, 4, True, False, 5, 4)),
        (11, Plan(1, 7, True, False, 6, 3)),
        (1, Plan(1, 3, False, False, 61, 9, paired=True)),
        (16, Plan(1, 3, False, False, 130, 6, paired=True)),
        (16, Plan(1, 3, False, False, 40, 6)),
        (13, Plan(2, 3, False, False, 40, 9)),
        (8, Plan(4, 4, False, False, 10, 4)),
    ],
    ids=str,
)
def test_every_kind_of_tile_of_few_rows(m: int, cut: Plan) -> None:
    """Not through the op. Whole rounds of tiles, a last round in part, a last tile in part, a last pair in part."""
    torch.manual_seed(0)
    kinds = (4112, 2304, 128, False, True), (6152, 1280, 32, True, False), (3104, 1536, 512, False, False)
    for n, k, group, zeros, silu in kinds[: 2 if cut.paired else 3]:
        weight = case.int4(n, k, group, torch.bfloat16, zeros=zeros, order=False, device="cuda")
        made = dataclasses.replace(cut, n_clusters=min(cut.n_clusters, -(-n // tile_rows(cut))))
        launch = hopper.load(hopper.Int4Shape(m, n, k, group, zeros), made, torch.bfloat16, silu, True, True, False)
        x = case.rows(m, k, torch.bfloat16, "cuda")
        bias, residual = (torch.randn(*size, device="cuda").bfloat16() for size in ((n,), (m, n // 2 if silu else n)))
        expected = reference.linear(x, weight, bias, None, residual.clone(), silu)
        got, again = (launch(x, weight, bias, None, residual.clone(), silu, None) for _ in range(2))
        assert case.error(got, expected) <= reference.TOLERANCE[torch.bfloat16]
        assert torch.equal(got, again)


def test_captured_it_takes_what_x_becomes() -> None:
    torch.manual_seed(0)
    for n, k, group, zeros in KINDS[1:3]:
        weight = case.int4(n, k, group, torch.bfloat16, zeros=zeros, order=True, device="cuda")
        for m in (1, 40):
            x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
            w4a16.linear(x, weight)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                got = w4a16.linear(x, weight)
            for _ in range(3):
                x.normal_()
                graph.replay()
                assert torch.equal(got, w4a16.linear(x, weight))
