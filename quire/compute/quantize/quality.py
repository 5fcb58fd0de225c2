"""How well a model predicts text: the loss of pieces whose states are at hand, in bits.

Owns the sum. Does not own the states (`session`) nor bytes of the text.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.nn.functional as F

from quire.compute.models.decoder import Decoder

ROWS = 256
"""Whose logits are there at once."""


def n_bits(ends: Decoder, states: Iterable[torch.Tensor], ids: torch.Tensor) -> float:
    """Bits that all tokens but the first of each piece take. states: of each piece [length, hidden], behind the last
    layer; ids: [n, length]."""
    nats = 0.0
    for piece, own in zip(states, ids, strict=True):
        for first in range(0, len(own) - 1, ROWS):
            rows = slice(first, min(first + ROWS, len(own) - 1))
            wanted = own[rows.start + 1 : rows.stop + 1]
            nats += float(F.cross_entropy(ends.logits(piece[rows]), wanted, reduction="sum"))
    return nats / math.log(2)
