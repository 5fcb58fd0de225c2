"""Means and percentiles of a list of measurements. Pure Python, so that the load generator needs no numpy."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

PERCENTILES = (50.0, 90.0, 99.0)


def percentile(values: Sequence[float], share: float) -> float:
    """The `share`-th percentile (0 to 100) with linear interpolation between ranks, as numpy's default.

    NaN for no values: a figure that was not measured must not look like 0.
    """
    if not 0 <= share <= 100:
        raise ValueError(f"a percentile lies between 0 and 100, not at {share}")
    if not values:
        return math.nan
    ordered = sorted(values)
    rank = (len(ordered) - 1) * share / 100
    low = math.floor(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean; NaN for no values."""
    return math.fsum(values) / len(values) if values else math.nan


def deviation(values: Sequence[float]) -> float:
    """Standard deviation of the population (numpy's default); NaN for no values."""
    if not values:
        return math.nan
    centre = mean(values)
    return math.sqrt(mean([(value - centre) ** 2 for value in values]))


def summary(name: str, values: Sequence[float], percentiles: Iterable[float] = PERCENTILES) -> dict[str, float]:
    """`mean_<name>`, `median_<name>`, `std_<name>` and `p<share>_<name>` of `values`, in their unit."""
    result = {f"mean_{name}": mean(values), f"median_{name}": percentile(values, 50), f"std_{name}": deviation(values)}
    return result | {f"p{share:g}_{name}": percentile(values, share) for share in percentiles}
