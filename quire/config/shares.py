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
from quire.config.parameters import Cut, Matrix, NormTable, Section, Tensor
from quire.core.errors import ConfigError

MOST_RANKS = 64
"""That a refusal looks at for numbers that would do."""


Ranges = tuple[tuple[int, int], ...]
"""(first, number) of ranges of rows that a rank has under one another."""


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's part of a matrix."""

    matrix: Matrix
    """What the rank has, as a matrix of its own."""
    rows: tuple[Ranges, ...]
    """Of each part, in the whole part."""
    first_column: int = 0


class Region(msgspec.Struct, frozen=True):
    """Where one rank's part of a tensor lies in the whole tensor."""

    rows: Ranges
    columns: tuple[int, int] | None = None
    """(first, number); None: all."""

    @property
    def n_rows(self) -> int:
        """Of the part."""
        return n_rows_of(self.rows)


def share(matrix: Matrix, rank: int, n_ranks: int, *, row_step: int = 1, column_step: int = 1) -> Share:
    """The part of rank `rank` of `n_ranks`, all of one size, but for the last of a vocabulary.

    row_step: rows of a part but the last are a multiple of it, as the parts lie under one another; column_step: columns
    that share something. Both bind a cut that goes through them. Raises ConfigError where the matrix cannot be divided.
    """
    if n_ranks == 1 or matrix.cut in (Cut.REPLICATED, Cut.EXPERT):
        return Share(matrix=matrix, rows=_all_rows(matrix))
    if matrix.cut is Cut.ROW:
        n_in = part_of(f"{matrix.name} has {matrix.n_in} inputs", matrix.n_in, n_ranks, matrix.unit, column_step)
        bias = matrix.bias and rank == 0  # it is added once
        mine = msgspec.structs.replace(matrix, n_in=n_in, bias=bias, cut=Cut.REPLICATED)
        return Share(matrix=mine, rows=_all_rows(matrix), first_column=rank * n_in)
    rows: list[Ranges] = []
    for number, ((name, n_rows), sections) in enumerate(zip(matrix.parts, _sections(matrix), strict=True)):
        if matrix.cut is Cut.VOCABULARY:
            rows.append((_vocabulary(name, n_rows, rank, n_ranks),))
        else:
            last_step = 1 if number == len(matrix.parts) - 1 else row_step
            rows.append(_ranges(f"{name} has {{}} outputs", sections, rank, n_ranks, row_step, last_step))
    parts = tuple((name, n_rows_of(own)) for (name, _), own in zip(matrix.parts, rows, strict=True))
    mine = msgspec.structs.replace(matrix, parts=parts, sections=(), cut=Cut.REPLICATED)
    return Share(matrix=mine, rows=tuple(rows))


def n_rows_of(ranges: Ranges) -> int:
    """All that are in them."""
    return sum(number for _, number in ranges)


def _all_rows(matrix: Matrix) -> tuple[Ranges, ...]:
    return tuple(((0, n_rows),) for _, n_rows in matrix.parts)


def _sections(matrix: Matrix) -> tuple[tuple[Section, ...], ...]:
    """Of each part."""
    first_repeated = len(matrix.parts) - matrix.n_repeated
    return matrix.sections or tuple(
        (Section(n_rows, matrix.unit, number >= first_repeated),) for number, (_, n_rows) in enumerate(matrix.parts)
    )


def _ranges(
    what: str, sections: tuple[Section, ...], rank: int, n_ranks: int, step: int = 1, last_step: int = 1
) -> Ranges:
    """A rank's rows of each. what: with {} for how many there are; step, last_step: a rank's rows of a section, and of
    the last one, are a multiple of it. Raises ConfigError."""
    found, start = [], 0
    for number, one in enumerate(sections):
        n_times = times_of(one.n_rows // one.unit, n_ranks, one.is_repeated)
        own_step = last_step if number == len(sections) - 1 else step
        own = part_of(what.format(one.n_rows), one.n_rows, n_ranks // n_times, one.unit, own_step)
        found.append((start + rank // n_times * own, own))
        start += one.n_rows
    return tuple(found)


def is_held(matrix: Matrix, rank: int, n_ranks: int) -> bool:
    """Whether a rank has any of it."""
    numbers, n_alike = matrix.turns
    return matrix.cut is not Cut.EXPERT or any(number * n_ranks // n_alike == rank for number in numbers)


def share_norm(table: NormTable, rank: int, n_ranks: int) -> NormTable:
    """A rank's part of the table of a norm, `first_row` of it being where it begins. Raises ConfigError."""
    if n_ranks == 1 or table.cut is Cut.REPLICATED:
        return table
    n_heads = table.shape[0] // table.unit
    n_times = times_of(n_heads, n_ranks, table.is_repeated)
    own = part_of(f"{table.name} has {n_heads} heads", n_heads, n_ranks // n_times) * table.unit
    return msgspec.structs.replace(
        table, shape=(own, *table.shape[1:]), first_row=rank // n_times * own, cut=Cut.REPLICATED
    )


def share_tensor(table: Tensor, rank: int, n_ranks: int) -> tuple[Tensor, Ranges]:
    """A rank's part of a tensor, and its rows in the whole. Raises ConfigError."""
    if n_ranks == 1 or table.cut is Cut.REPLICATED:
        return table, ((0, table.shape[0]),)
    sections = table.sections or (Section(table.shape[0], table.unit),)
    rows = _ranges(f"{table.name} has {{}} rows", sections, rank, n_ranks)
    mine = msgspec.structs.replace(table, shape=(n_rows_of(rows), *table.shape[1:]), sections=(), cut=Cut.REPLICATED)
    return mine, rows


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


def part_of(
    what: str, size: int, n_ranks: int, unit: int = 1, step: int = 1, cure: str = "take another number of ranks"
) -> int:
    """Of one rank, whole units and whole steps."""
    together = f" in units of {unit}" if unit > 1 else ""
    if size % (unit * n_ranks):
        raise ConfigError(f"{what}{together}, which {n_ranks} ranks cannot share equally", cure=cure)
    if size // n_ranks % step:
        raise ConfigError(
            f"{what}{together}: the {size // n_ranks} of one rank of {n_ranks} are not a multiple of the {step} that"
            " lie together in this weight scheme; take fewer ranks or another --quantization"
        )
    return size // n_ranks
