"""Log-probabilities of many positions, packed: what crosses from the engine to its clients and waits there to be read.

Owns the packed form, 8 bytes an entry, and what a row means.
Invariants: values are float32, as the device has them; a row is unpacked only when somebody looks at it.
"""

from __future__ import annotations

import array
import dataclasses
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, overload

import msgspec

FLOAT: Final = "f"
INT: Final = "i"
"""Type codes of `array`: float32 and int32."""
CELL: Final = struct.Struct("=if")
CELL_BYTES: Final = CELL.size


@dataclasses.dataclass(slots=True)
class Logprob:
    """Natural-log probability of one token at one position."""

    logprob: float
    rank: int | None = None
    """1 = the most probable."""
    decoded_token: str | None = None


class TokenLogprobs(msgspec.Struct, array_like=True):
    """Log-probabilities at one position, natural log, before temperature and truncation (raw model distribution)."""

    chosen: float
    """Of the token that stands there."""
    rank: int
    """1 = the most probable."""
    top_ids: list[int]
    top_logprobs: list[float]


Row = dict[int, Logprob]
"""Token id → Logprob; the token that stands there comes first."""


class PackedLogprobs(msgspec.Struct, array_like=True, gc=False):
    """Some rows, in order. Bytes are those of the machine: both ends are on one."""

    n_top: int
    """Most probable tokens in each row."""
    cells: bytes
    """Pairs of an int32 and a float32, 1 + n_top a row: rank (1 = the most probable) and log-probability of the token
    that stands there, then id and log-probability of the most probable ones. So a row of fewer is the beginning of a
    row of more."""

    @classmethod
    def of(cls, rows: Sequence[TokenLogprobs]) -> PackedLogprobs:
        """Pack rows that all have the same number of most probable tokens."""
        n_top = len(rows[0].top_ids) if rows else 0
        ints, floats = array.array(INT), array.array(FLOAT)
        for row in rows:
            if not len(row.top_ids) == len(row.top_logprobs) == n_top:
                n_ids, n_values = len(row.top_ids), len(row.top_logprobs)
                raise ValueError(f"{n_ids} ids and {n_values} values in one of the rows of {n_top}")
            ints.fromlist([row.rank, *row.top_ids])
            floats.fromlist([row.chosen, *row.top_logprobs])
        cells = array.array(INT, bytes(CELL_BYTES * len(ints)))
        cells[::2], cells[1::2] = ints, array.array(INT, floats.tobytes())
        return cls(n_top, cells.tobytes())

    @classmethod
    def join(cls, parts: Sequence[PackedLogprobs]) -> PackedLogprobs:
        """The rows of all parts, which have the same number of most probable tokens."""
        n_top = parts[0].n_top if parts else 0
        if any(part.n_top != n_top for part in parts):
            raise ValueError(f"rows of {sorted({part.n_top for part in parts})} most probable tokens are no one's")
        return cls(n_top, b"".join([part.cells for part in parts]))

    def sum_of_chosen(self) -> float:
        """Of the log-probabilities of the tokens that stand there."""
        cells = self.cells
        if len(cells) == CELL_BYTES * (1 + self.n_top):  # most often it is one
            value: float = CELL.unpack_from(cells)[1]
            return value
        return sum(array.array(FLOAT, self.cells)[1 :: 2 * (1 + self.n_top)])

    def rows(self) -> list[TokenLogprobs]:
        """The rows again, rounded to float32."""
        n, columns = self.n_top, Columns(self.n_top, [], self.cells)
        return [
            TokenLogprobs(chosen, rank, columns.top_ids[at * n : at * n + n], columns.top_logprobs[at * n : at * n + n])
            for at, (chosen, rank) in enumerate(zip(columns.chosen, columns.ranks, strict=True))
        ]


class Columns:
    """Some rows for who lays them out: token ids, and flat lists of what was packed."""

    __slots__ = ("chosen", "n_top", "ranks", "token_ids", "top_ids", "top_logprobs")

    def __init__(self, n_top: int, token_ids: list[int], cells: bytes | bytearray) -> None:
        self.n_top, self.token_ids = n_top, token_ids
        self.top_ids: list[int] = array.array(INT, cells)[::2].tolist()
        self.top_logprobs: list[float] = array.array(FLOAT, cells)[1::2].tolist()
        self.ranks, self.chosen = self.top_ids[:: 1 + n_top], self.top_logprobs[:: 1 + n_top]
        del self.top_ids[:: 1 + n_top], self.top_logprobs[:: 1 + n_top]


class LogprobRows(Sequence[Any]):
    """A growing sequence of rows, each a dict token id → `Logprob` with the token that stands there first.

    Reads like the list of dicts that vLLM has. first: a prompt's first token, which nothing predicts: its row is None.
    """

    __slots__ = ("_cells", "_name", "first", "n_top", "token_ids")

    def __init__(self, name: Callable[[int], str | None], first: int | None = None) -> None:
        """name: the text of a token."""
        self._name = name
        self.first = first
        self.n_top = 0
        self.token_ids, self._cells = array.array(INT), bytearray()

    def add(self, packed: PackedLogprobs, token_ids: Sequence[int]) -> None:
        """Rows for the next tokens. ValueError if there is not one for each."""
        n_top = self.n_top = packed.n_top
        known, cells = self.token_ids, self._cells
        known.extend(token_ids)
        cells += packed.cells
        if len(cells) != len(known) * CELL_BYTES * (1 + n_top):
            n_rows = len(cells) / (CELL_BYTES * (1 + n_top))
            raise ValueError(f"{n_rows:g} rows of logprobs for {len(known)} tokens")

    def join(self, other: LogprobRows) -> None:
        """Append the rows of another one."""
        self.n_top = other.n_top
        self.token_ids.extend(other.token_ids)
        self._cells += other._cells

    def columns(self, start: int, stop: int) -> Columns:
        """Those of some rows of tokens; `first` has none."""
        size = CELL_BYTES * (1 + self.n_top)
        return Columns(self.n_top, self.token_ids[start:stop].tolist(), self._cells[start * size : stop * size])

    @property
    def n_cells(self) -> int:
        """Values in all rows."""
        return len(self._cells) // CELL_BYTES

    def _row(self, at: int) -> Row:
        token = self.token_ids[at]
        size = CELL_BYTES * (1 + self.n_top)
        (rank, chosen), *tops = CELL.iter_unpack(self._cells[at * size : (at + 1) * size])
        found = {token: Logprob(chosen, rank, self._name(token))}
        for rank, (top, value) in enumerate(tops, 1):
            if top != token:
                found[top] = Logprob(value, rank, self._name(top))
        return found

    def __len__(self) -> int:
        return len(self.token_ids) + (self.first is not None)

    @overload
    def __getitem__(self, index: int) -> Any: ...

    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        at = range(len(self))[index]
        if self.first is None:
            return self._row(at)
        return None if at == 0 else self._row(at - 1)

    def __iter__(self) -> Iterator[Any]:
        return (self[at] for at in range(len(self)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LogprobRows | list | tuple):
            return NotImplemented
        return len(self) == len(other) and all(mine == its for mine, its in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))
