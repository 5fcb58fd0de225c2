"""Products with adapters on a CPU: those of packed matrices, for the rows of each adapter in turn.

Invariant: what `qgemm.linear` says of a row holds here too: its bits depend neither on other rows nor on threads.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.kernels.gemm import Norm
from quire.kernels.lora.weight import Groups, Packed
from quire.kernels.selector import select


def add_packed(
    x: torch.Tensor, adapters: Sequence[Packed | None], groups: Groups, y: torch.Tensor, norm: Norm | None = None
) -> None:
    """See op.py. What lies between the two products is rounded to x's dtype."""
    order, linear = groups.order, select("qgemm", "linear", x)
    own_x, own_y = (x, y) if order is None else (x.index_select(0, order), y.index_select(0, order))
    for place, at, until in groups.spans:
        one = adapters[place]
        if one is None:
            continue
        inner, rows = linear(own_x[at:until], one.a, None, norm), own_y[at:until]
        for first, last, start, end, b in one.parts:
            linear(inner[:, first:last], b, None, None, rows[:, start:end])
    if order is not None:
        y.index_copy_(0, order, own_y)
