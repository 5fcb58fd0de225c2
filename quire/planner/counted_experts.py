"""What steps read of experts, by how often an engine's rows chose each of them: in place of an even choice.

Owns the arithmetic: rows of a step choose one apart from another, each expert with its share of all that was counted in
its layer. Does not own the counting (`engine/expert_load`). Rows that are alike choose alike, and read less.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Sequence

import msgspec

from quire.planner.expert_loads import ExpertLoads, spread
from quire.planner.formats import Formats
from quire.planner.operators import Operator, product_operator
from quire.planner.parts import Product


class CountedExperts(msgspec.Struct, frozen=True):
    """Of all layers with experts, but those in which nothing was counted."""

    loads: tuple[ExpertLoads, ...]
    """Of each layer."""
    n_ranks: int = 1
    """They divide the experts whole, each as many, in their order."""

    @classmethod
    def of(cls, counts: Sequence[Sequence[int]], n_ranks: int = 1) -> CountedExperts:
        """counts: of each layer, how many rows chose each expert."""
        layers = [tuple(map(float, layer)) for layer in counts if sum(layer)]
        return cls(tuple(ExpertLoads(words="counted", layers=(layer,)) for layer in layers), n_ranks)


@functools.lru_cache(maxsize=4096)
def counted_operator(experts: CountedExperts, product: Product, n_rows: float, formats: Formats) -> Operator:
    """One of their products for so many rows, the mean of all layers of as many experts; by an even choice where
    nothing was counted."""
    n_all = product.n_of_all
    chances = [
        spread(one, n_all, product.n_chosen, experts.n_ranks).ranks
        for one in experts.loads
        if len(one.layers[0]) == n_all
    ]
    each = [product_operator(msgspec.structs.replace(product, chances=one), n_rows, formats) for one in chances or [()]]
    return msgspec.structs.replace(
        each[0],
        weight_bytes=statistics.fmean(one.weight_bytes for one in each),
        row_bytes=statistics.fmean(one.row_bytes for one in each),
        n_flops=statistics.fmean(one.n_flops for one in each),
    )
