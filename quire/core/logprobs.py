"""Log-probabilities of many positions, packed: what crosses from the engine to its clients and waits there to be read.

Owns the packed form, 8 bytes an entry, and what a row means.
Invariants: values are float32, as the device has them; a row is unpacked only when somebody looks at it.
"""

from __future__ import annotations

import array
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, overload

import msgspec

FLOAT: Final = "f"
INT: Final = "i"
"""Type codes of `array`: float32 and int32."""


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


class PackedLogprobs(msgspec.Struct, array_like=True):
    """Some rows, in order. Bytes are those of the machine: both ends are on one."""

    n_top: int
    """Most probable tokens in each row."""
    chosen: bytes
    """float32 [n]: of the token that stands there."""
    ranks: bytes
    """int32 [n]: 1 = the most probable."""
    top_ids: bytes
    """int32 [n, n_top]"""
    top_logprobs: bytes
    """float32 [n, n_top]"""

    @classmethod
    def of(cls, rows: Sequence[TokenLogprobs]) -> PackedLogprobs:
        """Pack rows that all have the same number of most probable tokens."""
        n_top = len(rows[0].top_ids) if rows else 0
        ids, values = array.array(INT), array.array(FLOAT)
        for row in rows:
            ids.fromlist(row.top_ids)
            values.fromlist(row.top_logprobs)
        if not len(ids) == len(values) == n_top * len(rows):
            raise ValueError(f"{len(ids)} ids and {len(values)} values in {len(rows)} rows of {n_top}")
        chosen = array.array(FLOAT, [row.chosen for row in rows])
        ranks = array.array(INT, [row.rank for row in rows])
        return cls(n_top, chosen.tobytes(), ranks.tobytes(), ids.tobytes(), values.tobytes())

    @classmethod
    def join(cls, parts: Sequence[PackedLogprobs]) -> PackedLogprobs:
        """The rows of all parts, which have the same number of most probable tokens."""
        n_top = parts[0].n_top if parts else 0
        if any(part.n_top != n_top for part in parts):
            raise ValueError(f"rows of {sorted({part.n_top for part in parts})} most probable tokens are no one's")
        columns = ([getattr(part, name) for part in parts] for name in ("chosen", "ranks", "top_ids", "top_logprobs"))
        return cls(n_top, *map(b"".join, columns))

    def chosen_values(self) -> array.array[float]:
        """`chosen` as numbers."""
        return array.array(FLOAT, self.chosen)

    def rows(self) -> list[TokenLogprobs]:
        """The rows again, rounded to float32."""
        n = self.n_top
        chosen, ranks = self.chosen_values().tolist(), array.array(INT, self.ranks).tolist()
        ids, values = array.array(INT, self.top_ids).tolist(), array.array(FLOAT, self.top_logprobs).tolist()
        return [
            TokenLogprobs(one, rank, ids[at * n : at * n + n], values[at * n : at * n + n])
            for at, (one, rank) in enumerate(zip(chosen, ranks, strict=True))
        ]


class Columns:
    """Some rows for who lays them out: token ids, and flat lists of what was packed."""

    __slots__ = ("chosen", "n_top", "ranks", "token_ids", "top_ids", "top_logprobs")

    def __init__(self, rows: LogprobRows, start: int, stop: int) -> None:
        n = self.n_top = rows.n_top
        self.token_ids = rows.token_ids[start:stop].tolist()
        self.chosen = rows.chosen[start:stop].tolist()
        self.ranks = rows.ranks[start:stop].tolist()
        self.top_ids = rows.top_ids[start * n : stop * n].tolist()
        self.top_logprobs = rows.top_logprobs[start * n : stop * n].tolist()


class LogprobRows(Sequence[Any]):
    """A growing sequence of rows, each a dict token id → `Logprob` with the token that stands there first.

    Reads like the list of dicts that vLLM has. first: a prompt's first token, which nothing predicts: its row is None.
    """

    __slots__ = ("_name", "chosen", "first", "n_top", "ranks", "token_ids", "top_ids", "top_logprobs")

    def __init__(self, name: Callable[[int], str | None], first: int | None = None) -> None:
        """name: the text of a token."""
        self._name = name
        self.first = first
        self.n_top = 0
        self.token_ids, self.ranks, self.top_ids = array.array(INT), array.array(INT), array.array(INT)
        self.chosen, self.top_logprobs = array.array(FLOAT), array.array(FLOAT)

    def add(self, packed: PackedLogprobs, token_ids: Sequence[int]) -> None:
        """Rows for the next tokens. ValueError if there is not one for each."""
        self.n_top = packed.n_top
        self.token_ids.extend(token_ids)
        self.chosen.frombytes(packed.chosen)
        self.ranks.frombytes(packed.ranks)
        self.top_ids.frombytes(packed.top_ids)
        self.top_logprobs.frombytes(packed.top_logprobs)
        n = len(self.token_ids)
        lengths = (len(self.chosen), len(self.ranks), len(self.top_ids), len(self.top_logprobs))
        if lengths != (n, n, n * self.n_top, n * self.n_top):
            raise ValueError(f"{len(self.chosen)} rows of logprobs for {n} tokens")

    def join(self, other: LogprobRows) -> None:
        """Append the rows of another one."""
        self.n_top = other.n_top
        for name in ("token_ids", "chosen", "ranks", "top_ids", "top_logprobs"):
            getattr(self, name).extend(getattr(other, name))

    @property
    def n_cells(self) -> int:
        """Values in all rows."""
        return len(self.chosen) + len(self.top_ids)

    def _row(self, at: int) -> Row:
        token = self.token_ids[at]
        found = {token: Logprob(self.chosen[at], self.ranks[at], self._name(token))}
        start = at * self.n_top
        for rank in range(1, self.n_top + 1):
            top = self.top_ids[start + rank - 1]
            if top != token:
                found[top] = Logprob(self.top_logprobs[start + rank - 1], rank, self._name(top))
        return found

    def __len__(self) -> int:
        return len(self.chosen) + (self.first is not None)

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
