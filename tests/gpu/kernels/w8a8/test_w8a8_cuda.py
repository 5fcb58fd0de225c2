"""Linear layers of 8 bits on a real GPU: against float64, rows alone, in a graph, and each kind of tile."""

from __future__ import annotations

import dataclasses

import pytest
import quantised_case as case
import torch

from quire.kernels import catalog, w8a8
from quire.kernels.gemm.hopper_product import Build, function_of
from quire.kernels.gemm.plan import ProductShape
from quire.kernels.gemm.wide import WidePlan, n_tiles
from quire.kernels.invariance import rows_alone
from quire.kernels.norm import rms_norm
from quire.kernels.w8a8 import hopper, reference, rounding, triton
from quire.kernels.w8a8.plan import CodedPlan

pytestmark = pytest.mark.gpu

needs_hopper = pytest.mark.skipif(catalog.hopper_obstacle() is not None, reason=str(catalog.hopper_obstacle()))
DTYPES = (torch.bfloat16, torch.float16)
ROWS = (1, 13, 20, 64, 257)
CASES = (("tensor", 4096, 1024), ("channel", 1040, 3072), ("blocks", 576, 7168), ("blocks", 4096, 1024))
CASES += (("tensor", 200, 392), ("blocks", 37, 130))
"""Scales, n, k; all but the last two are for the Hopper kernels. Of the first, x has a scale of its own, too."""


def poison() -> None:
    """Leaves NaN, of floats and of codes, where the next tensors will lie."""
    del [torch.full((16 << 20,), -1, dtype=torch.int8, device="cuda") for _ in range(4)][:]
    torch.full((64 << 20,), -1, dtype=torch.int8, device="cuda")


def compare(function, oracle, x: torch.Tensor, weight: tuple[object, ...], around: case.Around) -> None:
    """The oracle has x as this device norms it: another last digit would be another code of 8 bits."""
    poison()
    got, again = (function(x, *weight, *around.own().arguments) for _ in range(2))
    if around.norm is not None:
        x, around = rms_norm(x, *around.norm), dataclasses.replace(around, norm=None)
    expected = oracle(x, *weight, *around.own().arguments)
    error, limit = case.error(got, expected), reference.TOLERANCE[x.dtype]
    assert error <= limit, (function, x.shape, around.silu_mul)
    assert torch.equal(got, again)


@pytest.mark.parametrize("index", range(len(CASES)), ids=lambda i: "-".join(map(str, CASES[i])))
def test_e4m3_matches_float64(index: int) -> None:
    torch.manual_seed(0)
    scales, n, k = CASES[index]
    dtype = DTYPES[index % 2]
    weight = case.fp8(n, k, scales, "cuda")
    x_scale = torch.tensor([0.004], device="cuda") if index == 0 else None  # cuts off what is beyond 1.8
    for i, m in enumerate(ROWS):
        x = case.rows(m, k, dtype, "cuda")
        every = list(case.arounds(m, n, k, x))
        around = every[(i + index) % len(every)]
        if index < 4 and catalog.hopper_obstacle() is None:
            assert isinstance(hopper.prepare(x, *weight, x_scale, *around.arguments), hopper.Launch)
        for function in (op_fp8, triton.linear_fp8) if m in (1, 257) else (op_fp8,):
            compare(function, reference.linear_fp8, x, (*weight, x_scale), around)


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_become_the_codes_of_the_reference(dtype: torch.dtype, blocks: bool) -> None:
    """Bit for bit, at ties, too, by both kernels."""
    torch.manual_seed(0)
    for m, k in ((1, 130), (3, 640), (5, 4096), (2, 8192), (9, 14336), (300, 2048)):
        x = case.rows(m, k, dtype, "cuda")
        x[0, :128] = torch.arange(128, device="cuda", dtype=dtype).sub_(15) * 7 / 64  # the largest is a multiple of 7
        for given in (None, torch.tensor([0.004], device="cuda"))[: 1 if blocks else 2]:
            codes, scales = reference.quantise(x, torch.float8_e4m3fn, 128 if blocks else k, given)
            every = [triton.round_rows(x, torch.float8_e4m3fn, blocks, given, room=8)]
            if k % 128 == 0 and catalog.hopper_obstacle() is None:
                every.append(rounding.round_rows(x, blocks, given, room=8))
            for got in every:
                assert torch.equal(got.codes.view(torch.uint8), codes.view(torch.uint8)), (m, k)
                if given is None:
                    assert torch.equal(got.scales[..., :m], scales.T if blocks else scales[:, 0]), (m, k)


@needs_hopper
@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_norm_is_rounded_in_one_launch(dtype: torch.dtype, blocks: bool) -> None:
    """To the codes of what the norm's own kernel gives."""
    torch.manual_seed(0)
    for m, k in ((1, 128), (3, 640), (5, 4096), (2, 8192), (9, 14336), (512, 2048)):
        x, norm = case.rows(m, k, dtype, "cuda"), (torch.rand(k, device="cuda").add_(0.5).to(dtype), 1e-5)
        for given in (None, torch.tensor([0.004], device="cuda"))[: 1 if blocks else 2]:
            expected = rounding.round_rows(rms_norm(x, *norm), blocks, given, room=8)
            got = rounding.round_rows(x, blocks, given, room=8, norm=norm)
            assert torch.equal(got.codes.view(torch.uint8), expected.codes.view(torch.uint8)), (m, k)
            assert torch.equal(got.scales[..., :m], expected.scales[..., :m]) or given is not None, (m, k)


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


@pytest.mark.parametrize(("scales", "n", "k"), [CASES[1], CASES[2], CASES[5]], ids=str)
def test_a_row_alone_has_the_same_bits(scales: str, n: int, k: int) -> None:
    torch.manual_seed(0)
    weight = case.fp8(n, k, scales, "cuda")
    x = torch.randn(600, k, device="cuda", dtype=torch.bfloat16)
    with rows_alone():
        whole = w8a8.linear_fp8(x, *weight)
        for m in (1, 2, 8, 16, 64, 65, 200):
            assert torch.equal(w8a8.linear_fp8(x[:m], *weight), whole[:m]), (n, k, m)


def test_captured_it_takes_what_x_becomes() -> None:
    torch.manual_seed(0)
    for scales, n, k in CASES[2::3]:
        weight = case.fp8(n, k, scales, "cuda")
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
@pytest.mark.parametrize(
    ("tokens", "split", "kind", "silu", "rows"),
    [
        (64, 4, 1, True, 128),
        (96, 1, 2, False, 128),
        (128, 2, 2, True, 128),
        (128, 1, 2, False, 192),
        (128, 1, 2, True, 192),
        (192, 1, 1, False, 128),
        (192, 3, 2, True, 128),
        (256, 1, 1, True, 128),
        (256, 4, 1, False, 128),
        (256, 2, 2, False, 128),
    ],
)
def test_every_kind_of_wide_tile(tokens: int, split: int, kind: int, silu: bool, rows: int) -> None:
    """Not through the op, which takes only what is fastest."""
    torch.manual_seed(0)
    for m, n, k in ((65, 448, 1024), (257, 640, 1152)):
        weight = case.fp8(n, k, "blocks" if kind == 2 else "channel", "cuda")
        product = ProductShape(m, n, k // 2, silu=silu)
        tiles = n_tiles(product, tokens, rows)
        made = WidePlan(tokens, split, tiles if split > 1 else min(tiles, 3), 2, rows)
        function = function_of(product, made, Build(torch.bfloat16, False, silu, False, kind))
        launch = hopper.Launch(function, CodedPlan(product, made))
        x = case.rows(m, k, torch.bfloat16, "cuda")
        bias = torch.randn(n, device="cuda").bfloat16() if silu else None
        compare(launch, reference.linear_fp8, x, (*weight, None), case.Around(bias, None, None, silu, None))
