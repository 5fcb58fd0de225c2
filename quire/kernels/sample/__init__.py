"""Choosing a token for each row of logits: argmax, or the inverse of a truncated cumulative distribution."""

from quire.kernels.sample.draw import EMPTY, FINE, NON_FINITE, Draw, uniform
from quire.kernels.sample.op import choose

__all__ = ["EMPTY", "FINE", "NON_FINITE", "Draw", "choose", "uniform"]
