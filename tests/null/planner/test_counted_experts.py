"""What steps read of experts by how often an engine counted that each was chosen."""

from __future__ import annotations

import pytest

from quire.bench.shape import FOLDER
from quire.config.mesh import Mesh
from quire.config.model import read_arch
from quire.planner.counted_experts import CountedExperts, counted_operator
from quire.planner.formats import Formats
from quire.planner.operators import product_operator
from quire.planner.parts import Product, rank_parts

DEEPSEEK, MIXTRAL = (read_arch(FOLDER / name) for name in ("deepseek-v3", "mixtral-8x7b"))
ONE_OF_FOUR = Product(name="experts", n_times=7, n_in=2, n_out=3, n_bytes=10.0, products="bfloat16", n_of=4, n_of_all=4)


def read(counts: list[list[int]], n_rows: float, product: Product = ONE_OF_FOUR) -> float:
    """Matrices, of a layer."""
    return counted_operator(CountedExperts.of(counts), product, n_rows, Formats()).weight_bytes / product.n_bytes


def test_each_is_read_as_its_share_of_the_count_says() -> None:
    skewed, even = [30, 10, 0, 0], [5, 5, 5, 5]
    assert read([skewed], 1) == read([even], 1) == pytest.approx(1)
    assert read([skewed], 2) == pytest.approx((1 - 0.25**2) + (1 - 0.75**2))
    assert read([skewed, even], 2) == pytest.approx((1.375 + 4 * (1 - 0.75**2)) / 2), "the mean of the layers"
    assert read([skewed], 1000) == pytest.approx(2), "two are never read"
    assert read([even, [0, 0, 0, 0]], 2) == pytest.approx(1.75), "a layer without rows says nothing"
    assert read([[9, 0]], 2) == read([], 2) == ONE_OF_FOUR.read_bytes(2) / 10, "nothing was counted of such layers"


def test_rows_cost_what_they_cost() -> None:
    counted, even = counted_operator(CountedExperts.of([[30, 10, 0, 0]]), ONE_OF_FOUR, 8, Formats()), product_operator(
        ONE_OF_FOUR, 8, Formats()
    )  # fmt: skip
    assert (counted.n_times, counted.kind, counted.name) == (even.n_times, even.kind, even.name)
    assert counted.n_flops == pytest.approx(even.n_flops) and counted.row_bytes == pytest.approx(even.row_bytes)


@pytest.mark.parametrize("arch", [MIXTRAL, DEEPSEEK], ids=lambda arch: arch.family)
@pytest.mark.parametrize("n_rows", [1, 5, 300])
def test_even_counts_are_an_even_choice(arch, n_rows: int) -> None:
    for product in [one for one in rank_parts(arch, Mesh(), Formats()).products if one.is_experts]:
        counts = [[7] * product.n_of_all] * 3
        assert read(counts, n_rows, product) == pytest.approx(product.read_bytes(n_rows) / product.n_bytes)


def test_ranks_wait_for_the_one_that_reads_most() -> None:
    (product, *_) = [one for one in rank_parts(MIXTRAL, Mesh(tp=4, ep=4), Formats()).products if one.is_experts]
    hot = CountedExperts.of([[80, 80, 1, 1, 1, 1, 1, 1]], n_ranks=4)
    even = CountedExperts.of([[5] * 8], n_ranks=4)
    found = [counted_operator(one, product, 100, Formats()) for one in (hot, even)]
    assert found[0].weight_bytes <= 2 * product.n_bytes and found[0].n_flops > 2 * found[1].n_flops
