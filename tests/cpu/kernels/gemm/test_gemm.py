"""Linear layers: the composed path against float64, how products are cut for the Hopper kernel, and its compilation."""

from __future__ import annotations

import math
import random

import pytest
import torch
from gemm_case import Case, Inputs, error

from quire.kernels import gemm, jit
from quire.kernels.gemm import hopper, hopper_product, reference
from quire.kernels.gemm.estimate import fastest
from quire.kernels.gemm.plan import MAX_BYTES, MIN_STAGES, Plan, ProductShape, chunks_of, plan, shared_bytes, tiles_of
from quire.kernels.gemm.wide import SPLITS, WidePlan, n_tiles, wide_plan
from quire.kernels.hopper import compile_variant

CASES = [
    Case(1, 72, 64),
    Case(5, 96, 128, norm=True),
    Case(3, 96, 128, norm=True, silu_mul=True, bias=True),
    Case(17, 40, 192, residual=True, bias=True),
    Case(80, 56, 64, wide=True),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_float64(case: Case, dtype: torch.dtype) -> None:
    torch.manual_seed(case.m)
    inputs = Inputs.make(case, dtype, "cpu")
    got = inputs.run()
    assert got.dtype == (torch.float32 if case.wide else dtype)
    assert error(got, inputs.expected()) <= reference.TOLERANCE[dtype]


def test_the_residual_and_out_are_written_in_place() -> None:
    x, w, residual = torch.randn(3, 64), torch.randn(8, 64), torch.randn(3, 8)
    product = x @ w.T
    wanted, out = residual + product, torch.empty(3, 8)
    assert gemm.linear(x, w, residual=residual) is residual
    assert gemm.linear(x, w, out=out) is out
    torch.testing.assert_close(residual, wanted)
    torch.testing.assert_close(out, product)


def test_mismatches_are_refused() -> None:
    x, w = torch.zeros(2, 64), torch.zeros(8, 64)
    for match, arguments in (
        ("do not fit", {"w": torch.zeros(8, 32)}),
        ("contiguous", {"w": torch.zeros(64, 8).T}),
        ("even", {"w": torch.zeros(7, 64), "silu_mul": True}),
        ("bias", {"bias": torch.zeros(7)}),
        ("norm", {"norm": (torch.zeros(8), 1e-5)}),
        ("residual", {"residual": torch.zeros(2, 7)}),
        ("out", {"out": torch.zeros(2, 8).double()}),
        ("with residual", {"residual": torch.zeros(2, 8), "out": torch.zeros(2, 8)}),
    ):
        with pytest.raises(ValueError, match=match):
            gemm.linear(x, **{"w": w, **arguments})


def test_reasons_against_the_kernel() -> None:
    bf16 = torch.bfloat16
    assert "tensors are on cpu" in str(gemm.obstacle(torch.zeros(2, 64, dtype=bf16), torch.zeros(8, 64, dtype=bf16)))
    assert "65537 rows" in str(gemm.obstacle(torch.zeros(1, 64).expand(65537, 64), torch.zeros(8, 64)))
    assert "float32" in str(hopper.static_obstacle(ProductShape(1, 8, 64), torch.float32))
    assert "multiples of 8 and 64" in str(hopper.static_obstacle(ProductShape(1, 12, 64), bf16))
    assert "multiples of 16 and 64" in str(hopper.static_obstacle(ProductShape(1, 24, 64, silu=True), bf16))
    assert hopper.static_obstacle(ProductShape(64, 32, 64, silu=True), bf16) is None


def check_plan(product: ProductShape, made: Plan) -> None:
    """Every tile has a cluster, every block a slice of K, and all of it fits."""
    n_tiles = tiles_of(product, made)
    n_passes = math.ceil(n_tiles / made.n_clusters)
    assert 1 <= made.n_clusters <= n_tiles and made.n_clusters * (n_passes - 1) < n_tiles
    assert math.ceil(product.k / 64 / chunks_of(made)) >= made.cluster
    assert made.n_stages >= MIN_STAGES and shared_bytes(product, made, made.n_stages) <= MAX_BYTES
    assert made.resident or not product.norm
    assert not product.silu or 32 % made.cluster == 0


def test_plans_of_random_products() -> None:
    draw = random.Random(0)
    for _ in range(300):
        norm = draw.random() < 0.4
        m, k = draw.randint(1, 16 if norm else 64), 64 * int(2 ** draw.uniform(0, 6 if norm else 8))
        product = ProductShape(m, 16 * int(2 ** draw.uniform(0, 14)), k, norm, draw.random() < 0.5)
        made = plan(product, draw.choice([78, 114, 132]))
        assert made is not None, product
        check_plan(product, made)


@pytest.mark.parametrize(
    ("product", "cluster", "n_clusters"),
    [
        (ProductShape(1, 6144, 4096), 1, 96),
        (ProductShape(1, 4096, 4096), 2, 64),
        (ProductShape(16, 28672, 4096, norm=True, silu=True), 2, 64),
        (ProductShape(64, 28672, 4096), 1, 112),
        (ProductShape(1, 1024, 3072), 8, 16),
        (ProductShape(1, 14336, 8192, norm=True, silu=True), 2, 56),
    ],
)
def test_plans_that_were_the_fastest(product: ProductShape, cluster: int, n_clusters: int) -> None:
    """Measured on an H200 with 132 multiprocessors."""
    made = plan(product, 132)
    assert made is not None and (made.cluster, made.n_clusters) == (cluster, n_clusters)


def test_wide_plans_of_random_products() -> None:
    draw = random.Random(1)
    for _ in range(300):
        m, k = int(2 ** draw.uniform(5, 13)), 64 * int(2 ** draw.uniform(0, 8))
        product = ProductShape(m, 16 * int(2 ** draw.uniform(0, 13)), k, silu=draw.random() < 0.5)
        n_processors = draw.choice([78, 114, 132])
        made = wide_plan(product, n_processors)
        tiles = n_tiles(product, made.tokens)
        assert made.split in SPLITS[made.tokens] and made.tokens // 8 % made.split == 0
        assert made.n_teams * made.split <= max(n_processors, 1) and 1 <= made.n_teams <= tiles
        assert made.split == 1 or (made.n_teams == tiles and k // 64 >= made.split)
        assert math.ceil(tiles / made.n_teams) * (made.n_teams - 1) < tiles
        assert made.n_together >= 1


@pytest.mark.parametrize(
    ("product", "kind"),
    [
        (ProductShape(1, 6144, 4096, norm=True), Plan),
        (ProductShape(16, 6144, 4096, norm=True), str),
        (ProductShape(32, 28672, 4096, silu=True), Plan),
        (ProductShape(128, 6144, 4096), WidePlan),
        (ProductShape(128, 4096, 1024), str),
        (ProductShape(256, 1024, 2048), WidePlan),
        (ProductShape(192, 28672, 4096, silu=True), WidePlan),
        (ProductShape(256, 6144, 4096), str),
        (ProductShape(128, 1024, 3072), WidePlan),
        (ProductShape(512, 6144, 1024, silu=True), WidePlan),
        (ProductShape(256, 28672, 4096, silu=True), WidePlan),
        (ProductShape(512, 28672, 4096, silu=True), str),
        (ProductShape(8192, 28672, 4096, silu=True), WidePlan),
    ],
)
def test_the_fastest_way(product: ProductShape, kind: type) -> None:
    """Measured on an H200: few rows, many, or torch."""
    assert isinstance(fastest(product, 132), kind)


@pytest.mark.parametrize("left", [16, 40])
def test_products_that_leave_processors(left: int) -> None:
    """Of many rows, whatever would be fastest; of few rows nothing changes."""
    for m, n, k, silu in (
        (65, 2560, 8192, False),
        (512, 14336, 8192, True),
        (700, 4096, 1024, False),
        (9000, 8192, 7168, False),
    ):
        made = fastest(ProductShape(m, n, k, silu=silu), 132, left=left)
        assert isinstance(made, WidePlan) and made.n_teams * made.split <= 132 - left
    few = ProductShape(3, 14336, 8192, norm=True, silu=True)
    assert fastest(few, 132, left=left) == fastest(few, 132)


def test_a_plan_that_does_not_fit_is_none() -> None:
    assert plan(ProductShape(16, 4096, 64 * 1024, norm=True), 132) is None


PLANNED = (ProductShape(3, 6144, 4096, norm=True, silu=True), ProductShape(64, 4096, 14336))


@pytest.mark.skipif(jit.compiler("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize(
    ("product", "made"),
    [
        *((shape, plan(shape, 132)) for shape in PLANNED),
        (ProductShape(192, 4096, 14336), WidePlan(192, 3, 32, 1)),
        (ProductShape(256, 28672, 4096, silu=True), WidePlan(256, 1, 112, 1)),
    ],
    ids=["fused", "64 rows", "split", "wide"],
)
def test_kernels_compile(product: ProductShape, made: Plan | WidePlan) -> None:
    build = hopper_product.Build(torch.bfloat16, residual=not product.silu, bias=True, wide=False)
    assert compile_variant(*hopper_product.variant_of(product, made, build)).exists()
