"""Adapters of several ranks: each reads its own part from the folder, and one is kept once all have it.

Owns both ends of that: rank 0 asks and waits in the thread that reads, the others answer by files in the folder where
all meet. Does not own names (`engine/adapters`) nor what a rank keeps (`compute/adapters`).
Invariants: steps go on meanwhile on every rank; an adapter that one rank cannot read is kept by none, and no rank ends
of it; what is kept has one content on all.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import itertools
import pathlib
from typing import Any, Final, Protocol

from quire.compute.adapters.files import inside
from quire.core.errors import EngineError, LoadError, QuireError, shown
from quire.core.events import EndKind
from quire.engine.executors.executor import RanksLost
from quire.engine.ranks.wire import AdapterOrder, DropAdapter, ForgetAdapter, KeepAdapter, ReadAdapter

LOOK_S: Final = 0.005
"""Between looks for the answers of other ranks."""


class Reader(Protocol):
    """One rank's adapters: see `compute/adapters/host`."""

    def read_adapter(self, path: str, root: str) -> tuple[str, int, Any]: ...

    def keep_adapter(self, content_id: str, kept: Any) -> None: ...

    def drop_adapter(self, content_id: str) -> None: ...


class Ranks(Protocol):
    """The other ranks, as far as adapters are concerned: see `group.RankGroup`."""

    meeting_point: str

    @property
    def pids(self) -> list[int]: ...

    def say(self, said: AdapterOrder) -> None: ...

    def ends_within(self, seconds: float) -> bool: ...


class AdaptersOfRanks:
    """Rank 0's end: `engine.adapters.AdapterReader` of all ranks."""

    def __init__(self, own: Reader, ranks: Ranks) -> None:
        self._own, self._ranks = own, ranks
        self._numbers = itertools.count()

    def read_adapter(self, path: str, root: str) -> tuple[str, int, tuple[int, Any]]:
        """See `HostAdapters`; returns when all ranks have read it. Raises LoadError too if one of them could not,
        RanksLost if one is gone."""
        content_id, rank, kept = self._own.read_adapter(path, root)
        number, folder = next(self._numbers), str(inside(path, root))  # links followed, as here: `..` of a link is not
        root = str(pathlib.Path(root).expanduser().resolve()) if root else ""  # the folder in which the link lies
        self._ranks.say(ReadAdapter(number, folder, root, content_id))
        answers = {other: self._answer(number, other) for other in range(1, len(self._ranks.pids) + 1)}
        refused = [f"rank {other}: {answer}" for other, answer in answers.items() if answer]
        if refused:
            self._ranks.say(ForgetAdapter(number))
            raise LoadError(f"adapter {shown(path)}: {refused[0]}")
        return content_id, rank, (number, kept)

    def _answer(self, number: int, rank: int) -> str:
        """Of a rank: why it could not read, empty if it has."""
        file = answer_file(self._ranks.meeting_point, number, rank)
        while not file.exists():
            if self._ranks.ends_within(LOOK_S):
                raise RanksLost("the ranks are ended, and read no adapters any more", EndKind.STALL)
        text = file.read_text()
        file.unlink()
        return text

    def keep_adapter(self, content_id: str, kept: tuple[int, Any]) -> None:
        """See `HostAdapters`."""
        number, own = kept
        self._own.keep_adapter(content_id, own)
        self._ranks.say(KeepAdapter(number, content_id))

    def drop_adapter(self, content_id: str) -> None:
        """See `HostAdapters`."""
        self._own.drop_adapter(content_id)
        self._ranks.say(DropAdapter(content_id))


class RankAdapters:
    """Another rank's end."""

    def __init__(self, own: Reader, rank: int, meeting_point: str) -> None:
        self._own, self._rank, self._meeting_point = own, rank, meeting_point
        self._read: dict[int, Any] = {}
        """By the number of the reading."""
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="quire-adapters")

    def do(self, order: AdapterOrder) -> None:
        """Waits for no file."""
        match order:
            case ReadAdapter(number):
                self._thread.submit(self._take, order).add_done_callback(functools.partial(self._answer, number))
            case KeepAdapter(number, content_id):
                self._own.keep_adapter(content_id, self._read.pop(number))
            case ForgetAdapter(number):
                self._read.pop(number, None)
            case DropAdapter(content_id):
                self._own.drop_adapter(content_id)

    def _answer(self, number: int, read: concurrent.futures.Future[None]) -> None:
        file = answer_file(self._meeting_point, number, self._rank)
        new = file.with_suffix(".new")
        with contextlib.suppress(FileNotFoundError):  # rank 0 has removed the folder: nobody asks any more
            new.write_text(reason_of(read.exception()))
            new.rename(file)

    def _take(self, order: ReadAdapter) -> None:
        content_id, _, kept = self._own.read_adapter(order.path, order.root)
        if content_id != order.content_id:
            raise EngineError("its folder has changed while ranks read it: load it again")
        self._read[order.number] = kept


def reason_of(error: BaseException | None) -> str:
    """Why something failed, empty if it did not."""
    if isinstance(error, QuireError):
        return error.message
    return "" if error is None else f"{type(error).__name__}: {error}".partition("\n")[0]


def answer_file(meeting_point: str, number: int, rank: int) -> pathlib.Path:
    """Where a rank says how a reading ended."""
    return pathlib.Path(meeting_point).with_name(f"adapter-{number}-{rank}")
