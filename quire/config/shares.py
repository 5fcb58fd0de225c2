"""What one rank holds of a matrix that is divided among ranks: sizes, and where they lie in the whole. Torch-free.

Owns the arithmetic. Does not own how a matrix is cut (`parameters`), nor what a scheme adds to it (`compute/schemes`).
Invariant: the shares of all ranks are the whole matrix, each number once (a replicated one: in every share).
"""

from __future__ import annotations

import msgspec

from quire.config.parameters import Cut, Matrix
from quire.core.errors import ConfigError


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's part of a matrix."""

    matrix: Matrix
    """What the rank has, as a matrix of its own."""
    first_rows: tuple[int, ...]
    """Of each part, in the whole part."""
    first_column: int = 0


def share(matrix: Matrix, rank: int, n_ranks: int, *, row_step: int = 1, column_step: int = 1) -> Share:
    """The part of rank `rank` of `n_ranks`, all of one size.

    row_step: rows of a part but the last are a multiple of it, as the parts lie under one another; column_step: columns
    that share something. Both bind a cut that goes through them. Raises ConfigError where the matrix cannot be divided.
    """
    if n_ranks == 1 or matrix.cut is Cut.REPLICATED:
        return Share(matrix=matrix, first_rows=(0,) * len(matrix.parts))
    if matrix.cut is Cut.ROW:
        n_in = _part(f"{matrix.name} has {matrix.n_in} inputs", matrix.n_in, n_ranks, matrix.unit, column_step)
        bias = matrix.bias and rank == 0  # it is added once
        mine = msgspec.structs.replace(matrix, n_in=n_in, bias=bias, cut=Cut.REPLICATED)
        return Share(matrix=mine, first_rows=(0,), first_column=rank * n_in)
    parts = []
    for number, (name, rows) in enumerate(matrix.parts):
        step = 1 if number == len(matrix.parts) - 1 else row_step
        parts.append((name, _part(f"{name} has {rows} outputs", rows, n_ranks, matrix.unit, step)))
    mine = msgspec.structs.replace(matrix, parts=tuple(parts), cut=Cut.REPLICATED)
    return Share(matrix=mine, first_rows=tuple(rank * rows for _, rows in parts))


def _part(what: str, size: int, n_ranks: int, unit: int, step: int) -> int:
    """Of one rank, whole units and whole steps."""
    together = f" in units of {unit}" if unit > 1 else ""
    if size % (unit * n_ranks):
        raise ConfigError(f"{what}{together}, which {n_ranks} ranks cannot share equally: take another number of ranks")
    if size // n_ranks % step:
        raise ConfigError(
            f"{what}{together}: the {size // n_ranks} of one rank of {n_ranks} are not a multiple of the {step} that"
            " lie together in this weight scheme; take fewer ranks or another --quantization"
        )
    return size // n_ranks
