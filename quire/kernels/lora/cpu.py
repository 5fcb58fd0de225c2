"""Products with adapters on a CPU: those of packed matrices, for the rows of each adapter in turn.

Invariant: what `qgemm.linear` says of a row holds here too: its bits depend neither on other rows nor on threads.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.kernels import qgemm
from quire.kernels.gemm import Norm
from quire.kernels.lora.weight import Groups, Packed


def add_packed(
    x: torch.Tensor, adapters: Sequence[Packed | None], groups: Groups, y: torch.Tensor, norm: Norm | None = None
) -> None:
    """See op.py. What lies between the two products is rounded to x's dtype."""
    for place, rows in groups:
        one = adapters[place]
        if one is None:
            continue
        own = y[rows]  # a view of neighbours, else a copy
        inner = qgemm.linear(x[rows], one.a, norm=norm)
        for first, last, start, end, b in one.parts:
            qgemm.linear(inner[:, first:last], b, residual=own[:, start:end])
        if not isinstance(rows, slice):
            y[rows] = own
