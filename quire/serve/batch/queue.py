"""The lines of batches that have no output yet, and whose turn it is. Owns the tables `lines` and `results`.

Works inside the transactions of `BatchStore`. A batch's input is queued as a whole (`WHOLE_INPUT`) until its lines are
known. A line is marked before it is sent: one that is marked when a process has died is a suspect, and runs alone.
Invariants: a line is in `lines` until its output is in `results`, which happens in one transaction, once; owners take
turns, whoever has the fewest lines running first; of an owner the oldest batch comes first.
"""

from __future__ import annotations

import dataclasses
import enum
import sqlite3
from collections.abc import Iterable, Mapping, Set

from quire.serve.batch.schema import WHOLE_INPUT, decoded
from quire.serve.batch.space import Space

BATCHES_AHEAD = 2
"""Batches of an owner whose lines are in the table at once: what bounds the table."""


@enum.unique
class LineState(enum.IntEnum):
    """Of a line without output."""

    IDLE = 0
    RUNNING = 1
    SUSPECT = 2
    """It was running when a process died."""
    ON_TRIAL = 3
    """A suspect that runs while no other line does."""


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """A line that was taken to be run, or an input to be read."""

    owner: str
    batch_id: str
    endpoint: str
    """Empty if the batch's record cannot be read."""
    input_file_id: str
    number: int
    """Of the line in the input, from 0."""
    offset: int
    length: int
    """Bytes in the input, from `offset` on, without the line end."""
    double: int
    """`doubled` of the line that has its custom_id first; 0: no earlier one has."""
    deaths: int
    """How often a process has died while nothing else ran."""
    is_on_trial: bool = False

    @property
    def first(self) -> int | None:
        """Number of the line that has its custom_id first, if it is known."""
        return self.double - _DOUBLE if self.double >= _DOUBLE else None

    @property
    def is_whole_input(self) -> bool:
        """True for the reading of the input."""
        return self.number == WHOLE_INPUT


@dataclasses.dataclass(frozen=True, slots=True)
class ScannedLine:
    """A line as it was found in an input."""

    number: int
    offset: int
    length: int
    double: int


_DOUBLE = 2


def doubled(first: int) -> int:
    """Column `is_double` of a line whose custom_id line `first` has already. 1 is of folders that do not say which."""
    return first + _DOUBLE


_FIELDS = (
    "b.owner, b.id, b.status, b.created_at, b.record, b.input_file_id,"
    " l.line, l.offset, l.length, l.is_double, l.deaths"
)
_IDLE_INPUT = (
    f"select {_FIELDS} from batches b join lines l on l.batch_id = b.id and l.line = {WHOLE_INPUT} and l.state = 0"
    " where b.owner = ? and b.status = 'validating' and b.ending is null order by b.rowid limit 1"
)
_IDLE_LINE = (
    f"select {_FIELDS} from batches b cross join lines l on l.batch_id = b.id and l.line >= 0 and l.state = 0"
    " where b.owner = ? and b.status = 'in_progress' and b.ending is null order by b.rowid, l.line limit 1"
)
_SUSPECTS = (
    f"select {_FIELDS} from lines l join batches b on b.id = l.batch_id where l.state = 2 and b.ending is null"
    " and l.deaths >= ? order by l.deaths, l.batch_id, l.line limit ?"
)
_OWNERS = (
    "with recursive found (owner) as (select min(owner) from batches where {0} union all"
    " select (select min(owner) from batches where {0} and owner > found.owner) from found"
    " where found.owner is not null) select owner from found where owner is not null"
)
_OWNERS_QUEUED = _OWNERS.format("status = 'validating' and ending is null")
_OWNERS_RUNNING = _OWNERS.format("status = 'in_progress' and ending is null")


class LineQueue:
    """Whose turn it is."""

    def __init__(self, database: sqlite3.Connection, space: Space) -> None:
        self._database = database
        self._space = space

    # ---- taking

    def take_input(self, busy: Set[str], after: str) -> Line | None:
        """An input to be read. busy: owners whose turn it is not; after: the owner who had the last turn."""
        for owner in _in_turn(self._owners(_OWNERS_QUEUED), after):
            query = "select count(*) from batches where owner = ? and status = 'in_progress' and ending is null"
            if owner not in busy and self._database.execute(query, (owner,)).fetchone()[0] < BATCHES_AHEAD:
                line = self._first(_IDLE_INPUT, owner)
                if line is not None:
                    return self._mark(line, LineState.RUNNING)
        return None

    def take_lines(
        self, n_most: int, most_bytes: int, running: Mapping[str, int], paused: Set[str], after: str
    ) -> tuple[list[Line], bool]:
        """At most so many lines and bytes of them, and whether more wait for room. The first may have any length if
        nothing runs.

        running: lines that run, by owner; paused: owners whose turn it is not."""
        owners = [owner for owner in _in_turn(self._owners(_OWNERS_RUNNING), after) if owner not in paused]
        counts = {owner: running.get(owner, 0) for owner in owners}
        found: list[Line] = []
        is_idle = not any(running.values())
        while owners and len(found) < n_most:
            owner = min(owners, key=counts.__getitem__)
            line = self._first(_IDLE_LINE, owner)
            if line is None:
                owners.remove(owner)
                continue
            if line.length > most_bytes and not (is_idle and not found):
                break  # it waits until there is room: smaller ones of others must not pass it for ever
            most_bytes -= line.length
            found.append(self._mark(line, LineState.RUNNING))
            counts[owner] += 1
            owners.remove(owner)
            owners.append(owner)  # among equals the one that has waited longest
        return found, bool(owners)

    def suspect(self, paused: Set[str]) -> Line | None:
        """The suspect that is to be tried next: one of which the fewest processes have died."""
        rows = map(_line, self._database.execute(_SUSPECTS, (0, 1000)))
        return next((line for line in rows if line.owner not in paused), None)

    def begin_trial(self, line: Line) -> Line:
        """Mark a suspect, which runs while no other line does."""
        return self._mark(line, LineState.ON_TRIAL)

    def convicts(self, least_deaths: int) -> list[Line]:
        """Some suspects of which at least so many processes have died."""
        return list(map(_line, self._database.execute(_SUSPECTS, (least_deaths, 100))))

    def accuse(self) -> int:
        """A process has died: what was marked is suspect. Returns how many lines that were."""
        query = "update lines set state = 2, deaths = deaths + (state = 3) where state in (1, 3)"
        return self._database.execute(query).rowcount

    def release(self) -> None:
        """No line runs any more, and nothing has died of one."""
        self._database.execute("update lines set state = state - 1 where state in (1, 3)")

    def put_back(self, line: Line) -> None:
        """A line that was taken did not run: it waits as before."""
        state = LineState.SUSPECT if line.is_on_trial else LineState.IDLE
        self._database.execute(
            "update lines set state = ? where batch_id = ? and line = ?", (int(state), line.batch_id, line.number)
        )

    # ---- coming in and going out

    def add_input(self, batch_id: str, n_bytes: int) -> None:
        """Queue the input of a new batch to be read."""
        query = "insert into lines (batch_id, line, offset, length, is_double) values (?, ?, 0, ?, 0)"
        self._database.execute(query, (batch_id, WHOLE_INPUT, n_bytes))

    def add_lines(self, batch_id: str, lines: Iterable[ScannedLine]) -> None:
        """Lines of an input, but those that have their output already."""
        self._database.executemany(
            "insert or ignore into lines (batch_id, line, offset, length, is_double) select ?1, ?2, ?3, ?4, ?5"
            " where not exists (select 1 from results where batch_id = ?1 and line = ?2)",
            [(batch_id, line.number, line.offset, line.length, line.double) for line in lines],
        )

    def end_input(self, batch_id: str) -> None:
        """The input was read."""
        self._database.execute("delete from lines where batch_id = ? and line = ?", (batch_id, WHOLE_INPUT))

    def finish(self, owner: str, batch_id: str, number: int, output: bytes, *, is_error: bool) -> None:
        """Keep the output of a line; of two for one line the first stays. Raises StorageFull, with nothing kept."""
        gone = self._database.execute("delete from lines where batch_id = ? and line = ?", (batch_id, number)).rowcount
        if not gone:
            return
        self._space.charge(owner, len(output) + 1)
        self._database.execute("insert into results values (?, ?, ?, ?)", (batch_id, number, int(is_error), output))
        name = "n_failed" if is_error else "n_completed"
        self._database.execute(f"update batches set {name} = {name} + 1 where id = ?", (batch_id,))

    def left(self, batch_id: str, n_most: int) -> list[ScannedLine]:
        """The first lines without output, whether they run or not."""
        query = "select line, offset, length, is_double from lines where batch_id = ? order by line limit ?"
        rows = self._database.execute(query, (batch_id, n_most))
        return [ScannedLine(*row) for row in rows]

    def is_done(self, batch_id: str) -> bool:
        """True if no line is without output."""
        return self._database.execute("select 1 from lines where batch_id = ? limit 1", (batch_id,)).fetchone() is None

    def drop(self, batch_id: str, n_most: int, *, least: int = WHOLE_INPUT) -> bool:
        """Forget some lines from number `least` on; False if there were none."""
        query = (
            "delete from lines where batch_id = ?1 and line in"
            " (select line from lines where batch_id = ?1 and line >= ?3 order by line limit ?2)"
        )
        return self._database.execute(query, (batch_id, n_most, least)).rowcount > 0

    def _owners(self, query: str) -> list[str]:
        return [row[0] for row in self._database.execute(query)]

    def _first(self, query: str, owner: str) -> Line | None:
        row = self._database.execute(query, (owner,)).fetchone()
        return None if row is None else _line(row)

    def _mark(self, line: Line, state: LineState) -> Line:
        self._database.execute(
            "update lines set state = ? where batch_id = ? and line = ?", (int(state), line.batch_id, line.number)
        )
        return dataclasses.replace(line, is_on_trial=state is LineState.ON_TRIAL)


def _line(row: tuple[str, str, str, int, str, str, int, int, int, int, int]) -> Line:
    owner, batch_id, status, created_at, record, input_file_id, number, offset, length, double, deaths = row
    endpoint = decoded(batch_id, status, created_at, record).endpoint
    return Line(owner, batch_id, endpoint, input_file_id, number, offset, length, double, deaths)


def _in_turn(owners: list[str], after: str) -> list[str]:
    """Owners, who come in order, from the one behind `after` on."""
    return [owner for owner in owners if owner > after] + [owner for owner in owners if owner <= after]
