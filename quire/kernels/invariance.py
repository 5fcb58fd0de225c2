"""`rows_alone`: a region in which the bits of a row do not depend on the other rows of its batch, nor on how many.

Owns the switch, of the thread that launches. Does not own what it means for a kernel: products never split K
(`gemm/estimate.py`), norms and rotations have one kernel for all numbers of rows, attention is planned with
`batch_invariant`. Invariant: what is launched outside of such a region does not know of it.
"""

from __future__ import annotations

import contextlib
import contextvars
import enum
from collections.abc import Iterator
from typing import Final


@enum.unique
class RowsAlone(enum.Enum):
    """Which steps a device launches so."""

    NEVER = "never"
    """Its kernels are so anyway, or never."""
    ASKED = "asked"
    """Those with a token of a request that asks."""
    ALWAYS = "always"


_ALONE: Final = contextvars.ContextVar("rows_alone", default=False)


@contextlib.contextmanager
def rows_alone() -> Iterator[None]:
    """Launch, or capture, row-invariant kernels until the region ends."""
    token = _ALONE.set(True)
    try:
        yield
    finally:
        _ALONE.reset(token)


def are_rows_alone() -> bool:
    """Whether this is such a region."""
    return _ALONE.get()
