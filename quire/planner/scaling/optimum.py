"""What a budget buys under a scaling law: the best model, curves of equal FLOPs, cheap inference.

Owns the search over sizes. Does not own laws (`laws`), nor what FLOPs cost (`training/cluster`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from quire.core.errors import ConfigError
from quire.planner.scaling.laws import FLOPS_PER_PARAMETER_TOKEN, ParametricLaw, Point, ScalingLaw

FLOPS_PER_SERVED_TOKEN: Final = 2
"""Of a parameter: the forward pass alone."""
GOLDEN: Final = (math.sqrt(5) - 1) / 2
TOLERANCE: Final = 1e-10
"""Of the logarithm of a size."""


class Curve(msgspec.Struct, frozen=True):
    """Models of all sizes for one budget."""

    flops: float
    n_parameters: tuple[float, ...]
    losses: tuple[float, ...]
    best: Point
    best_loss: float


class Lifetime(msgspec.Struct, frozen=True):
    """A model, and its FLOPs from the first token trained to the last one served."""

    point: Point
    loss: float
    serving_flops: float

    @property
    def total_flops(self) -> float:
        return self.point.flops + self.serving_flops


def least(cost: Callable[[float], float], low: float, high: float) -> float:
    """Where a function with one valley between two numbers is least: golden section."""
    left, right = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
    at_left, at_right = cost(left), cost(right)
    while high - low > TOLERANCE * max(1.0, abs(low)):
        if at_left <= at_right:
            high, right, at_right = right, left, at_left
            left = high - GOLDEN * (high - low)
            at_left = cost(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + GOLDEN * (high - low)
            at_right = cost(right)
    return (low + high) / 2


def curves(law: ScalingLaw, budgets: Sequence[float], *, n_points: int = 61, spread: float = 30.0) -> list[Curve]:
    """Loss over size for each budget, from 1/spread of the best size to spread times it. ConfigError for a law without
    a loss."""
    found = []
    for flops in budgets:
        best = law.optimum(flops)
        best_loss = _loss(law, best)
        sizes = [best.n_parameters * spread ** (2 * i / (n_points - 1) - 1) for i in range(n_points)]
        losses = [_loss(law, Point(n, flops / FLOPS_PER_PARAMETER_TOKEN / n)) for n in sizes]
        found.append(Curve(flops, tuple(sizes), tuple(losses), best, best_loss))
    return found


def _loss(law: ScalingLaw, point: Point) -> float:
    loss = law.loss(point.n_parameters, point.n_tokens)
    if loss is None:
        raise ConfigError(
            f"--law {law.name} says which model is best, not how good: take one with a loss, as besiroglu"
        )
    return loss


def lifetime(law: ParametricLaw, point: Point, n_served: float, serving_weight: float = 1.0) -> Lifetime:
    """Of a model that serves so many tokens, read and written.

    serving_weight: what a FLOP of serving costs in FLOPs of training; above 1, as decoding uses less of a device.
    """
    served = FLOPS_PER_SERVED_TOKEN * point.n_parameters * n_served * serving_weight
    return Lifetime(point, law.loss(point.n_parameters, point.n_tokens), served)


def cheapest_lifetime(law: ParametricLaw, loss: float, n_served: float, serving_weight: float = 1.0) -> Lifetime:
    """The model of this loss whose training and serving take the fewest FLOPs together.

    Sardana et al. 2024, equation 3: least 6 N D + 2 N S among L(N, D) = loss. At it alpha A / N^alpha is
    (1 + weight S / 3 D) times beta B / D^beta; without serving that is the optimum of Hoffmann et al.
    """
    if loss <= law.e:
        raise ConfigError(f"a loss of {loss:g} is out of reach: this law ends at {law.e:g}")

    def cost(log_size: float) -> float:
        size = math.exp(log_size)
        point = Point(size, law.tokens_to(loss, size))
        return point.flops + FLOPS_PER_SERVED_TOKEN * size * n_served * serving_weight

    smallest = (law.a / (loss - law.e)) ** (1 / law.alpha)
    # Between the size that never reaches the loss and the best one without serving, whose terms are as beta to alpha.
    largest = smallest * (1 + law.alpha / law.beta) ** (1 / law.alpha)
    size = math.exp(least(cost, math.log(smallest), math.log(largest) + 1e-6))
    return lifetime(law, Point(size, law.tokens_to(loss, size)), n_served, serving_weight)
