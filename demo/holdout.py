"""Owns the split between training and held-out examples.

An example is named by a key of plain values (operands, a file name, a phrase with its values). The key alone
decides its side, so training and evaluation agree without sharing a list. About one key in twenty is held out.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from typing import TypeVar

HELD_OUT_SHARE = 20

Value = TypeVar("Value")


def is_held_out(*key: object) -> bool:
    """True when the example named by `key` must never be seen in training."""
    return zlib.crc32(repr(key).encode()) % HELD_OUT_SHARE == 0


def draw(
    rng: random.Random,
    held_out: bool,
    sample: Callable[[random.Random], Value],
    key: Callable[[Value], tuple[object, ...] | None],
) -> Value:
    """Sample until the value's key lies on the wanted side; a key of None belongs to training only."""
    while True:
        value = sample(rng)
        name = key(value)
        if (name is not None and is_held_out(*name)) == held_out:
            return value
