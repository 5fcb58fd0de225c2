"""Choosing a token for each row of logits: argmax, or the inverse of a truncated cumulative distribution."""

from quire.kernels.sample.draw import EMPTY, FINE, N_CONTROLS, NON_FINITE, Choice, Draw, TokenMasks
from quire.kernels.sample.op import choose, choose_by, lines, penalise, widen

__all__ = [
    "EMPTY", "FINE", "NON_FINITE", "N_CONTROLS", "Choice", "Draw", "TokenMasks", "choose",
    "choose_by", "lines", "penalise", "widen",
]  # fmt: skip
