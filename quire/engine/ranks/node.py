"""A machine that only has ranks: it meets node 0, starts its own ranks, and passes on what both say.

Owns the life of the process of `quire serve --headless`: its ranks, their ring, and what they write to their logs. Does
not own policy: node 0 decides (`nodes.py`). Imports no torch.
Invariants: its ranks end with the connection, however that ends, and with this process; it waits for the next engine of
node 0 for `arrival.AGAIN_S`, and ends when there is none.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import pathlib
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Final

import msgspec

from quire.compute.weights.hub import find_checkpoint
from quire.config.engine import EngineConfig
from quire.config.nodes import check_node_rank, ranks_of_node
from quire.core.errors import ConfigError, EngineError, QuireError
from quire.core.meeting import meeting_at
from quire.core.shortage import shortage
from quire.engine import logs
from quire.engine.child import read_start
from quire.engine.ranks import arrival
from quire.engine.ranks.arrival import connect, greet, resolve
from quire.engine.ranks.member import LocalRank
from quire.engine.ranks.node_log import RankLog
from quire.engine.ranks.node_wire import (
    BEAT_S,
    Frames,
    Kind,
    NodeStart,
    RankEnded,
    StacksOf,
    Started,
    Torn,
    encode_standings,
)
from quire.engine.ranks.process import be_killed_with_parent
from quire.engine.ranks.results import N_ENDS, READER
from quire.engine.ranks.ring import RankMemory, RingReader, RingWriter, make_memory
from quire.engine.ranks.start import RankStart

logger = logging.getLogger("quire.engine")

SILENT_S: Final = 10.0
"""Node 0 that says nothing for so long is gone, or cannot be reached."""
THREAD_S: Final = 2.0
LAST_CHARS: Final = 8192
"""Of what a rank wrote last, so much is told."""


class _Ended(Exception):
    """This process was told to end."""


class Session:
    """One engine of node 0, as this node has a part in it."""

    def __init__(self, frames: Frames, config: EngineConfig, folder: pathlib.Path) -> None:
        """config: of this node. folder: its checkpoint."""
        self._frames, self._config, self._folder = frames, config, folder
        self._ranks: list[LocalRank] = []
        self._logs: dict[int, RankLog] = {}
        self._fds: list[int] = []
        self._threads: list[threading.Thread] = []
        self._reader: threading.Thread | None = None
        self._writer: RingWriter | None = None
        self._heard_s, self._is_writing = time.monotonic(), False
        self._asked: list[int] = []
        """Ranks whose stacks node 0 wants."""
        self._shown: set[int] = set()
        """Those whose it has."""
        self._why = ""
        """Why the connection has ended; empty while it lives."""
        self.told_why = ""
        """Why node 0's engine cannot go on, if it has said so."""
        self.is_last = False
        """No engine will follow this one."""

    def run(self) -> str:
        """Until the connection ends, or node 0 is silent; returns why. Raises ConfigError where this node is not
        wanted, EngineError where it has no room for its ranks."""
        try:
            start = self._await_start()
            try:
                self._start_ranks(start)
            except OSError as error:  # of this machine, not of the connection
                raise EngineError(f"its ranks cannot be started: {shortage(error) or error}") from None
            pids = {rank.number: rank.pid for rank in self._ranks}
            self._frames.send(Kind.STARTED, msgspec.msgpack.encode(Started(pids)))
            self._heard_s = time.monotonic()
            self._reader = self._begin(self._read)
            self._begin(self._notice_silence)
            self._watch()
        except (_Ended, QuireError) as error:
            with contextlib.suppress(OSError):
                self._frames.send(Kind.LEAVES, f"ends: {error}".encode())
            raise
        except OSError as error:
            self._why = self._why or error.strerror or str(error)
            if self._reader is not None:  # what node 0 said at last may not be read yet
                self._reader.join(THREAD_S)
        finally:
            self._end()
        return self._why

    def _await_start(self) -> NodeStart:
        while True:
            kind, body = self._frames.receive(SILENT_S)
            match kind:
                case Kind.REFUSED:
                    raise ConfigError(f"node 0 refuses this node: {body.decode(errors='replace')}")
                case Kind.START:
                    try:
                        return msgspec.msgpack.decode(body, type=NodeStart)
                    except msgspec.DecodeError as error:
                        raise ConfigError(
                            f"node 0 ({self._frames.other_address}) sent a start that cannot be read ({error}): install"
                            " the same Quire on both nodes"
                        ) from None
                case Kind.LOST:
                    self.told_why = body.decode(errors="replace")
                case Kind.BYE:
                    self.is_last = True

    def _start_ranks(self, start: NodeStart) -> None:
        n_ranks, own_address = start.shape.n_ranks, self._frames.own_address
        numbers = ranks_of_node(start.config, n_ranks, self._config.node_rank)
        names = ", ".join(f"rank {number}" for number in numbers)
        logger.info("node 0 (%s) is there: starting %s", self._frames.other_address, names)
        config = msgspec.structs.replace(
            start.config, model=str(self._folder), node_rank=self._config.node_rank,
            num_threads=self._config.num_threads or start.config.num_threads,
        )  # fmt: skip
        fd = make_memory(n_ranks)
        bells = [os.eventfd(0) for _ in numbers]
        self._fds += [fd, *bells]
        memory = RankMemory(fd, n_ranks)
        self._writer = RingWriter(memory, bells, self._check, numbers)
        meeting_point = meeting_at(start.store_address, start.store_port, own_address)
        for number, bell in zip(numbers, bells, strict=True):
            reading, writing = os.pipe()
            log = self._logs[number] = RankLog()
            results = self._open_results(number) if number in start.shape.telling_ranks else (-1, -1)
            rank_start = RankStart(
                number, start.shape, config, str(self._folder), meeting_point, fd, bell, writing, start.is_server,
                *results,
            )  # fmt: skip
            try:
                place = f" on node {self._config.node_rank}"
                self._ranks.append(LocalRank(rank_start, reading, memory, place, log.writing))
            finally:
                os.close(log.writing)

    def _open_results(self, rank: int) -> tuple[int, int]:
        """Memory and bell for what a rank says of steps, which a thread passes on."""
        fd, bell = make_memory(N_ENDS), os.eventfd(0)
        self._fds += [fd, bell]
        ring = RingReader(RankMemory(fd, N_ENDS), READER, bell, self._check)
        self._begin(functools.partial(self._pass_on, rank, ring))
        return fd, bell

    def _begin(self, work: Callable[[], None]) -> threading.Thread:
        """In a thread that ends soon after the connection has."""
        thread = threading.Thread(target=work, daemon=True, name="quire-node")
        self._threads.append(thread)
        thread.start()
        return thread

    def _pass_on(self, rank: int, ring: RingReader) -> None:
        with contextlib.suppress(OSError):
            while ring.has_more(None):
                self._frames.send(Kind.RESULT, rank.to_bytes(2) + ring.get())

    def _check(self) -> None:
        """Raises Torn once nobody hears any more."""
        if self._why:
            raise Torn(self._why)

    def _read(self) -> None:
        """The thread that hears node 0."""
        try:
            while True:
                kind, body = self._frames.receive()
                self._heard_s = time.monotonic()
                match kind:
                    case Kind.SAID:
                        assert self._writer is not None
                        self._is_writing = True
                        self._writer.put(body)
                        self._is_writing = False
                        self._heard_s = time.monotonic()
                    case Kind.STACKS:
                        self._asked.append(int.from_bytes(body))
                    case Kind.LOST:
                        self.told_why = body.decode(errors="replace")
                    case Kind.BYE:
                        self.is_last = True
        except OSError as error:
            self._why = self._why or error.strerror or str(error)

    def _watch(self) -> None:
        """Say where ranks are, and which end; until the connection ends."""
        poll = select.poll()
        for rank in self._ranks:
            poll.register(rank.status_fd, select.POLLIN)
        while not self._why:
            ended = {fd for fd, _ in poll.poll(BEAT_S * 1000)}
            for rank in self._ranks:
                if rank.status_fd in ended:
                    poll.unregister(rank.status_fd)
                    self._say_end(rank)
            while self._asked:
                self._say_stacks(self._asked.pop(0))
            self._frames.send(Kind.STANDINGS, encode_standings({rank.number: rank.standing() for rank in self._ranks}))

    def _notice_silence(self) -> None:
        """In a thread of its own: whoever sends much waits for a node 0 that no longer hears."""
        while not self._why:
            time.sleep(BEAT_S)
            if not self._is_writing and time.monotonic() - self._heard_s > SILENT_S:
                self._why = f"it said nothing for {SILENT_S:g} s: its machine or the network is down, or it is stopped"
                self._frames.cut()

    def _say_end(self, rank: LocalRank) -> None:
        loss, may_be_another = rank.loss()
        status = rank.wait(0.0)
        if status != 0:  # else it was told to leave
            logger.error("%s; node 0 is told", loss.message)
        has_words = status not in (0, -signal.SIGKILL) and rank.number not in self._shown
        said = "" if not has_words else self._logs[rank.number].tail(BEAT_S)[-LAST_CHARS:]
        ended = RankEnded(rank.number, loss.message, loss.kind, said, may_be_another)
        self._frames.send(Kind.ENDED, msgspec.msgpack.encode(ended))

    def _say_stacks(self, number: int) -> None:
        for rank in self._ranks:
            if rank.number == number:
                self._shown.add(number)
                self._logs[number].forget()
                state = rank.state_words()
                rank.show_stacks()
                text = (f"(it was {state})\n" if state else "") + self._logs[number].tail(BEAT_S)
                self._frames.send(Kind.STACKS_OF, msgspec.msgpack.encode(StacksOf(number, text)))

    def _end(self) -> None:
        self._why = self._why or "the connection was closed"
        self._frames.cut()
        for rank in self._ranks:
            rank.end()
        for thread in self._threads:  # before others get the numbers of what they read
            thread.join(THREAD_S)
        for fd in self._fds:
            os.close(fd)
        self._frames.close()


def run_node(config: EngineConfig) -> int:
    """The life of a node that is not node 0; returns the exit status. Raises ConfigError or LoadError for what is wrong
    here."""
    check_node_rank(config)
    logs.set_up(f"node {config.node_rank}")
    resolve(config)
    folder = find_checkpoint(config.model, config.revision, config.download_dir)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _tell_to_end)
    session: Session | None = None
    try:
        while session is None or not session.is_last:
            frames = connect(config, is_first=session is None)
            greet(frames, config, folder)
            session = Session(frames, config, folder)
            _say_why(session, session.run())
    except _Ended as error:
        logger.info("this node ends: %s", error)
    except QuireError as error:
        logger.error("%s", error.message)
        return 1
    return 0


def _say_why(session: Session, why: str) -> None:
    """Why a session has ended."""
    if session.is_last:
        logger.info("node 0 has ended its engine: this node ends too")
        return
    lost = f"the engine of node 0 is lost ({session.told_why})" if session.told_why else f"node 0 is lost ({why})"
    logger.error("%s: the ranks of this node are ended; waiting %g s for the next engine", lost, arrival.AGAIN_S)


def _tell_to_end(number: int, _: object) -> None:
    raise _Ended(f"it was told to ({signal.Signals(number).name})")


def main() -> int:
    """Entry point of a process that another one has started, and that ends with it: options come as its first line."""
    line, _ = read_start()
    be_killed_with_parent()
    return run_node(msgspec.json.decode(line, type=EngineConfig))


if __name__ == "__main__":
    sys.exit(main())
