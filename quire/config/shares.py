"""What one rank holds of what is divided among ranks: sizes, and where they lie in the whole. Torch-free.

Owns the arithmetic. Does not own how a matrix is cut (`parameters`), nor what a scheme adds to it (`compute/schemes`).
Invariant: the shares of all ranks are the whole matrix, each number once; but a replicated one is in every share, and
units of keys and values are in several where there are fewer of them than ranks.
"""

from __future__ import annotations

import functools

import msgspec

from quire.config.arch import ModelArch
from quire.config.layers import LayerSpec
from quire.config.parameters import Cut, Matrix, NormTable, Tensor
from quire.core.errors import ConfigError

MOST_RANKS = 64
"""That a refusal looks at for numbers that would do."""


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's part of a matrix."""

    matrix: Matrix
    """What the rank has, as a matrix of its own."""
    first_rows: tuple[int, ...]
    """Of each part, in the whole part."""
    first_column: int = 0


class Region(msgspec.Struct, frozen=True):
    """Where one rank's part of a tensor lies in the whole tensor."""

    rows: tuple[tuple[int, int], ...]
    """(first, number) of ranges of rows that the rank has under one another."""
    columns: tuple[int, int] | None = None
    """(first, number); None: all."""

    @property
    def n_rows(self) -> int:
        """Of the part."""
        return sum(number for _, number in self.rows)


def share(matrix: Matrix, rank: int, n_ranks: int, *, row_step: int = 1, column_step: int = 1) -> Share:
    """The part of rank `rank` of `n_ranks`, all of one size, but for the last of a vocabulary.

    row_step: rows of a part but the last are a multiple of it, as the parts lie under one another; column_step: columns
    that share something. Both bind a cut that goes through them. Raises ConfigError where the matrix cannot be divided.
    """
    if n_ranks == 1 or matrix.cut in (Cut.REPLICATED, Cut.EXPERT):
        return Share(matrix=matrix, first_rows=(0,) * len(matrix.parts))
    if matrix.cut is Cut.ROW:
        n_in = part_of(f"{matrix.name} has {matrix.n_in} inputs", matrix.n_in, n_ranks, matrix.unit, column_step)
        bias = matrix.bias and rank == 0  # it is added once
        mine = msgspec.structs.replace(matrix, n_in=n_in, bias=bias, cut=Cut.REPLICATED)
        return Share(matrix=mine, first_rows=(0,), first_column=rank * n_in)
    parts, first_rows = [], []
    for number, (name, rows) in enumerate(matrix.parts):
        if matrix.cut is Cut.VOCABULARY:
            first, own = _vocabulary(name, rows, rank, n_ranks)
        else:
            step = 1 if number == len(matrix.parts) - 1 else row_step
            n_times = times_of(rows // matrix.unit, n_ranks, number >= len(matrix.parts) - matrix.n_repeated)
            own = part_of(f"{name} has {rows} outputs", rows, n_ranks // n_times, matrix.unit, step)
            first = rank // n_times * own
        parts.append((name, own))
        first_rows.append(first)
    mine = msgspec.structs.replace(matrix, parts=tuple(parts), cut=Cut.REPLICATED)
    return Share(matrix=mine, first_rows=tuple(first_rows))


def is_held(matrix: Matrix, rank: int, n_ranks: int) -> bool:
    """Whether a rank has any of it."""
    numbers, n_alike = matrix.turns
    return matrix.cut is not Cut.EXPERT or any(number * n_ranks // n_alike == rank for number in numbers)


def share_norm(table: NormTable, rank: int, n_ranks: int) -> NormTable:
    """A rank's part of the table of a norm, `first_row` of it being where it begins. Raises ConfigError."""
    if n_ranks == 1 or table.cut is Cut.REPLICATED:
        return table
    n_times = times_of(table.shape[0], n_ranks, table.is_repeated)
    own = part_of(f"{table.name} has {table.shape[0]} heads", table.shape[0], n_ranks // n_times, 1, 1)
    return msgspec.structs.replace(
        table, shape=(own, *table.shape[1:]), first_row=rank // n_times * own, cut=Cut.REPLICATED
    )


def share_tensor(table: Tensor, rank: int, n_ranks: int) -> tuple[Tensor, int]:
    """A rank's part of a tensor, and its first row in the whole. Raises ConfigError."""
    if n_ranks == 1 or table.cut is Cut.REPLICATED:
        return table, 0
    own = part_of(f"{table.name} has {table.shape[0]} rows", table.shape[0], n_ranks, table.unit)
    mine = msgspec.structs.replace(table, shape=(own, *table.shape[1:]), cut=Cut.REPLICATED)
    return mine, rank * own


def share_arch(arch: ModelArch, rank: int, n_ranks: int) -> ModelArch:
    """What a rank computes, as a description of its own: its heads and its part of feed-forwards. Logits, and all that
    goes along the residual stream, are as wide as in the whole. Raises ConfigError where it cannot be divided."""
    if n_ranks == 1:  # experts may be divided among others beside it
        ffns = {spec.ffn: spec.ffn.share(0, 1) for spec in arch.layers}
        layers = tuple(msgspec.structs.replace(spec, ffn=ffns[spec.ffn]) for spec in arch.layers)
        return arch if layers == arch.layers else msgspec.structs.replace(arch, layers=layers)
    part = functools.cache(lambda spec: share_layer(spec, rank, n_ranks))
    try:
        return msgspec.structs.replace(arch, layers=tuple(part(spec) for spec in arch.layers))
    except ConfigError as error:
        numbers = [str(n) for n in range(2, MOST_RANKS + 1) if _divides(arch, n)]
        message = f"{error.message} ({', '.join(numbers)} work)"
        if not numbers:
            message = f"{error.wrong}: take one rank; no other number works"
        raise ConfigError(message, param=error.param) from None


def _divides(arch: ModelArch, n_ranks: int) -> bool:
    try:
        for spec in dict.fromkeys(arch.layers):
            share_layer(spec, 0, n_ranks)
    except ConfigError:
        return False
    return True


def share_layer(spec: LayerSpec, rank: int, n_ranks: int) -> LayerSpec:
    """What a rank computes of a layer. Raises ConfigError where it cannot be divided."""
    ffn, mixer = spec.ffn.share(rank, n_ranks), spec.mixer.share(rank, n_ranks)
    return msgspec.structs.replace(spec, mixer=mixer, ffn=ffn)


def times_of(n_units: int, n_ranks: int, is_repeated: bool) -> int:
    """Ranks that have the same units; 1 where each has its own."""
    return n_ranks // n_units if is_repeated and n_units < n_ranks and n_ranks % n_units == 0 else 1


def _vocabulary(name: str, n_rows: int, rank: int, n_ranks: int) -> tuple[int, int]:
    """(first, number) of a rank's rows: equally many, but for the last rank."""
    most = -(-n_rows // n_ranks)
    if most * (n_ranks - 1) >= n_rows:
        raise ConfigError(
            f"{name} has {n_rows} rows, of which the last of {n_ranks} ranks would have none", cure="take fewer"
        )
    return rank * most, min(most, n_rows - rank * most)


def part_of(what: str, size: int, n_ranks: int, unit: int = 1, step: int = 1) -> int:
    """Of one rank, whole units and whole steps."""
    together = f" in units of {unit}" if unit > 1 else ""
    if size % (unit * n_ranks):
        raise ConfigError(
            f"{what}{together}, which {n_ranks} ranks cannot share equally", cure="take another number of ranks"
        )
    if size // n_ranks % step:
        raise ConfigError(
            f"{what}{together}: the {size // n_ranks} of one rank of {n_ranks} are not a multiple of the {step} that"
            " lie together in this weight scheme; take fewer ranks or another --quantization"
        )
    return size // n_ranks
