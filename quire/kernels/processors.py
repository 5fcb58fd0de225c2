"""`leaving`: a region whose products of many rows leave some multiprocessors to what runs beside them.

Owns the switch, of the thread that launches. Does not own what runs there, nor how a product is cut (`gemm/wide.py`).
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Final

FEW_BLOCKS: Final = 16
"""Multiprocessors for a sum over ranks: 8,192 threads keep its link busy while a product goes on, which is bound by the
GPU's power, not by them. A whole number of pairs."""

_LEFT: Final = contextvars.ContextVar("left", default=0)


@contextlib.contextmanager
def leaving(n: int) -> Iterator[None]:
    """Launch products that leave so many free, until the region ends."""
    token = _LEFT.set(n)
    try:
        yield
    finally:
        _LEFT.reset(token)


def n_left() -> int:
    """How many; 0 outside of such a region."""
    return _LEFT.get()
