"""Choosing a token for each row of logits: argmax, or the inverse of a truncated cumulative distribution."""

from quire.kernels.sample.draw import (
    EMPTY,
    FINE,
    LONGEST_COMPARED,
    N_CONTROLS,
    N_HISTORY,
    NON_FINITE,
    Choice,
    Draw,
    TokenMasks,
)
from quire.kernels.sample.op import choose, choose_by, lines, penalise, widen

__all__ = [
    "EMPTY", "FINE", "LONGEST_COMPARED", "NON_FINITE", "N_CONTROLS", "N_HISTORY", "Choice", "Draw", "TokenMasks",
    "choose", "choose_by", "lines", "penalise", "widen",
]  # fmt: skip
