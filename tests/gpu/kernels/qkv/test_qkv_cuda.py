"""From the fused projection to queries and pages on a real GPU: against float64, and against the norm's own kernel."""

from __future__ import annotations

import dataclasses
import importlib

import pytest
import torch
from qkv_case import Shape, arguments, check, check_codes, check_integers, copied, random_shape

from quire.kernels import catalog
from quire.kernels.norm import rms_norm
from quire.kernels.qkv import reference, rotate_and_store
from quire.kernels.selector import select

pytestmark = pytest.mark.gpu

needs_hopper = pytest.mark.skipif(catalog.hopper_obstacle() is not None, reason=str(catalog.hopper_obstacle()))
SHAPES = [
    Shape(0, 16, 8, 128, 128),
    Shape(1, 16, 8, 128, 128),
    Shape(64, 32, 8, 128, 128, q_norm=False, k_norm=False, n_padding=60),
    Shape(300, 12, 4, 80, 20, page_size=4),
    Shape(8192, 32, 8, 128, 128, n_padding=3),
    Shape(70_000, 2, 1, 16, 16, page_size=128),
    Shape(5, 4, 2, 512, 512),
    Shape(5, 6, 2, 88, 32, page_size=1),
    *(random_shape(seed) for seed in range(12)),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_float64(dtype: torch.dtype, shape: Shape) -> None:
    check(rotate_and_store, shape, dtype, "cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_triton_matches_float64_where_it_is_not_chosen(dtype: torch.dtype, shape: Shape) -> None:
    check(importlib.import_module("quire.kernels.qkv.triton").rotate_and_store, shape, dtype, "cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_pages_in_e4m3(dtype: torch.dtype, shape: Shape) -> None:
    """The codes of torch's conversion, by the chosen kernel and by Triton's."""
    check_codes(rotate_and_store, shape, dtype, "cuda")
    check_codes(importlib.import_module("quire.kernels.qkv.triton").rotate_and_store, shape, dtype, "cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_pages_of_integers(dtype: torch.dtype) -> None:
    """What the reference makes of the numbers that are rounded, but for ties; by Triton, which is chosen."""
    of_triton = importlib.import_module("quire.kernels.qkv.triton").rotate_and_store
    for shape in (Shape(40, 12, 3, 80, 80, page_size=4), Shape(300, 16, 8, 128, 128), Shape(9, 4, 4, 64, 16)):
        check_integers(of_triton, shape, dtype, "cuda")
        given = [*arguments(shape, dtype, "cuda")]
        given[6:8] = [torch.zeros((*x.shape[:3], shape.d + 4), dtype=torch.int8, device="cuda") for x in given[6:8]]
        assert select("qkv", "rotate_and_store", *given).__module__.endswith("triton")


@needs_hopper
@pytest.mark.parametrize("n", [3, 512])
@pytest.mark.parametrize("rotary", [128, 64, 0])
def test_equals_the_reference_without_norms(n: int, rotary: int) -> None:
    """Its arithmetic rounds where torch's does: each product, then their sum."""
    given = arguments(Shape(n, 8, 4, 128, rotary, q_norm=False, k_norm=False), torch.bfloat16, "cuda")
    wanted = copied(given)
    assert select("qkv", "rotate_and_store", *given).__module__.endswith("hopper")
    assert torch.equal(rotate_and_store(*given), reference.rotate_and_store(*wanted))
    assert torch.equal(given[6], wanted[6]) and torch.equal(given[7], wanted[7])


@needs_hopper
def test_a_row_does_not_depend_on_the_others() -> None:
    """Nor on whether the table was read ahead for it, which is so where there are few."""
    given = arguments(Shape(500, 16, 8, 128, 128), torch.bfloat16, "cuda")
    q = rotate_and_store(*copied(given))
    for i in (0, 1, 499):
        alone = [*copied(given)]
        for place in (0, 4, 8):
            alone[place] = alone[place][i : i + 1].clone()
        assert torch.equal(rotate_and_store(*alone)[0], q[i])


@needs_hopper
def test_which_implementation_runs() -> None:
    def name(dtype: torch.dtype = torch.bfloat16, **changed: int) -> str:
        shape = dataclasses.replace(Shape(3, 8, 4, 128, 128), **changed)
        return select("qkv", "rotate_and_store", *arguments(shape, dtype, "cuda")).__module__.rpartition(".")[2]

    assert name() == name(rotary=64) == name(rotary=0) == name(d=96, rotary=96) == name(page_size=3) == "hopper"
    assert name(rotary=20) == name(torch.float32) == "triton"


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
    """Captured once, it serves later rows, positions and cache locations that were written into the same tensors."""
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
