"""What experts read first once they are chosen, so that memory can be asked for it while the choice is still made.

Owns which numbers these are. Does not ask for them (csrc/cuda/router.cu). Invariant: it is a guess by shapes alone,
which costs bytes where it is wrong, and never changes a result.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Final, NamedTuple

import torch

from quire.kernels.gemm.hopper_product import n_processors_of
from quire.kernels.moe.plan import ExpertsShape, FewPlan, plan, takes_shared


class Following(NamedTuple):
    """Matrices that are read next, contiguous, of the rows' type."""

    up: torch.Tensor
    """Of experts [E, 2 * inner, hidden], gate rows first."""
    shared: tuple[torch.Tensor, torch.Tensor] | None = None
    """Of what every token goes through beside them: [2 * size, hidden], likewise, and [hidden, size]."""


BYTES: Final = 24 << 20
"""Asked for at most of first matrices: half of an H200's L2 cache, and what memory gives in 5 microseconds."""
BEHIND_BYTES: Final = 12 << 20
"""Of the shared matrix behind them."""
LEAST_TOUCHED: Final = 0.9
"""Share of experts that uniform routing touches, from which on it pays to guess that all of them are."""
FEW_ITEM, WIDE_TILE = 8, 128
"""Rows of gate that a block of either kernel takes at once."""
ALIGNMENT_BYTES: Final = 16
"""Of what is asked for."""
WIDE_STEP: Final = 64
"""Columns of a stage of the one for many rows."""


class Ahead(NamedTuple):
    """Runs of rows of gate, and of the same of up, as `ask_ahead` in csrc/cuda/router.cu takes them."""

    experts: int = 0
    inner: int = 0
    runs: int = 0
    items: int = 0
    """Those in which all inner vectors are cut: run i begins with item i * items // runs."""
    step: int = 0
    """Rows of an item."""
    rows: int = 0
    """Of a run."""
    columns: int = 0
    """Of a row, from the first on."""


NOTHING: Final = Ahead()


class Asked(NamedTuple):
    """What memory is asked for."""

    matrices: torch.Tensor | None = None
    ahead: Ahead = NOTHING
    """Of `matrices`."""
    behind: torch.Tensor | None = None
    """From its beginning on, behind those."""
    behind_bytes: int = 0


def asked_of(then: Following, n: int, n_chosen: int, device: torch.device) -> Asked:
    """When n rows choose so many experts."""
    n_experts, both, hidden = then.up.shape
    shape, width = ExpertsShape(n, n_chosen, n_experts, hidden, both // 2), then.up.element_size()
    if then.shared is not None and _begin_with_shared(shape, then.shared[1].shape[1]):
        first, second = then.shared
        n_bytes = min(second.nbytes, BEHIND_BYTES) // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        found = Asked(first, _first_rows(len(first) // 2, hidden, width), second, n_bytes)
    else:
        found = Asked(then.up, _of_experts(shape, n_processors_of(device), width))
    begins = [one.data_ptr() for one in (found.matrices, found.behind) if one is not None]
    return found if found.ahead.runs and not any(one % ALIGNMENT_BYTES for one in begins) else Asked()


def _begin_with_shared(shape: ExpertsShape, size: int) -> bool:
    """Whether inner vectors of this size, which all tokens have, are read by the kernel for few rows; the one for many
    reads them last."""
    more = size // shape.inner
    both = dataclasses.replace(
        shape, n_chosen=shape.n_chosen + more, n_experts=shape.n_experts + more, n_shared=more
    )
    return takes_shared(both) and isinstance(plan(both), FewPlan)


def _first_rows(size: int, hidden: int, width: int) -> Ahead:
    return Ahead(1, size, 1, 1, 1, min(size, BYTES // (2 * hidden * width)), hidden)


@functools.cache
def _of_experts(shape: ExpertsShape, n_blocks: int, width: int) -> Ahead:
    """Where all of them are likely to be read: what each block of their kernel begins with, if all are."""
    if 1.0 - (1.0 - shape.n_chosen / shape.n_experts) ** shape.n < LEAST_TOUCHED:
        return NOTHING
    each = BYTES // (2 * n_blocks * width)
    if isinstance(plan(shape), FewPlan):
        items, step, rows, columns = (
            shape.n_experts * shape.inner // FEW_ITEM,
            FEW_ITEM,
            each // shape.hidden,
            shape.hidden,
        )
    else:
        items, step, rows, columns = n_blocks, WIDE_TILE, WIDE_TILE, min(each // WIDE_TILE, shape.hidden)
    rows, columns = rows // FEW_ITEM * FEW_ITEM, columns // WIDE_STEP * WIDE_STEP
    return Ahead(shape.n_experts, shape.inner, n_blocks, items, step, rows, columns) if rows and columns else NOTHING
