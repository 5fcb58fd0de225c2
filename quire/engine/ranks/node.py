"""A machine that only has ranks: it meets node 0, starts its own ranks, and passes on what both say.

Owns the life of the process of `quire serve --headless`: its ranks, their ring, and what they write to their logs. Does
not own policy: node 0 decides (`nodes.py`). Imports no torch.
Invariants: its ranks end with the connection, however that ends, and with this process; it waits for the next engine of
node 0 for `AGAIN_S`, and ends when there is none.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import pathlib
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Final

import msgspec

from quire.compute.weights.hub import find_checkpoint
from quire.config.engine import EngineConfig
from quire.config.nodes import check_node_rank, ranks_of_node
from quire.core.errors import ConfigError, QuireError, shown
from quire.core.meeting import loopback_hint, meeting_at
from quire.engine import logs
from quire.engine.child import read_start
from quire.engine.ranks.member import LocalRank
from quire.engine.ranks.node_wire import (
    BEAT_S,
    Frames,
    Hello,
    Kind,
    NodeStart,
    RankEnded,
    StacksOf,
    Started,
    Torn,
    encode_standings,
    model_digest,
    versions,
)
from quire.engine.ranks.process import be_killed_with_parent
from quire.engine.ranks.results import N_ENDS, READER
from quire.engine.ranks.ring import RankMemory, RingReader, RingWriter, make_memory
from quire.engine.ranks.start import RankStart

logger = logging.getLogger("quire.engine")

COME_S: Final = 600.0
"""Node 0 must listen within so much time, at first."""
AGAIN_S: Final = 60.0
"""And after its engine has ended: it is started again, or will never be."""
SILENT_S: Final = 10.0
"""Node 0 that says nothing for so long is gone, or cannot be reached."""
TRY_S: Final = 0.5
SAY_S: Final = 10.0
CONNECT_S: Final = 5.0
OWN_OPTIONS: Final = (
    "model", "revision", "download_dir", "tokenizer", "served_model_name", "chat_template", "node_rank", "master_addr",
    "num_threads",
)  # fmt: skip
"""Of each node; all others are those of node 0."""
THREAD_S: Final = 2.0
LAST_CHARS: Final = 8192
SAID_BYTES: Final = 1 << 16
"""Of what a rank has written, so much is kept."""


class _Ended(Exception):
    """This process was told to end."""


class Log:
    """What a rank writes: goes on to this process's own, and the end of it is kept."""

    def __init__(self) -> None:
        self._fd, self.writing = os.pipe()
        self._tail = bytearray()
        self._thread = threading.Thread(target=self._copy, daemon=True, name="quire-node-log")
        self._thread.start()

    def tail(self, wait_s: float = 0.0) -> str:
        """What came last. wait_s: for its end."""
        self._thread.join(wait_s)
        return bytes(self._tail).decode(errors="replace")

    def forget(self) -> None:
        """What has come so far."""
        self._tail.clear()

    def _copy(self) -> None:
        while data := os.read(self._fd, 65536):
            self._tail += data
            del self._tail[:-SAID_BYTES]
            with contextlib.suppress(OSError):  # nobody reads it
                sys.stderr.buffer.write(data)
                sys.stderr.flush()
        os.close(self._fd)


class Session:
    """One engine of node 0, as this node has a part in it."""

    def __init__(self, frames: Frames, config: EngineConfig, folder: pathlib.Path) -> None:
        """config: of this node. folder: its checkpoint."""
        self._frames, self._config, self._folder = frames, config, folder
        self._ranks: list[LocalRank] = []
        self._logs: dict[int, Log] = {}
        self._fds: list[int] = []
        self._threads: list[threading.Thread] = []
        self._writer: RingWriter | None = None
        self._heard_s, self._is_writing = time.monotonic(), False
        self._asked: list[int] = []
        """Ranks whose stacks node 0 wants."""
        self._shown: set[int] = set()
        """Those whose it has."""
        self._why = ""
        """Why the connection has ended; empty while it lives."""
        self.is_last = False
        """No engine will follow this one."""

    def run(self) -> str:
        """Until the connection ends, or node 0 is silent; returns why. Raises ConfigError where this node is not
        wanted."""
        try:
            start = self._await_start()
            self._start_ranks(start)
            pids = {rank.number: rank.pid for rank in self._ranks}
            self._frames.send(Kind.STARTED, msgspec.msgpack.encode(Started(pids)))
            self._begin(self._read)
            self._watch()
        except (_Ended, QuireError) as error:
            with contextlib.suppress(OSError):
                self._frames.send(Kind.LEAVES, f"ends: {error}".encode())
            raise
        except OSError as error:
            self._why = self._why or error.strerror or str(error)
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
                    return msgspec.msgpack.decode(body, type=NodeStart)
                case Kind.BYE:
                    self.is_last = True

    def _start_ranks(self, start: NodeStart) -> None:
        _check_alike(self._config, start.config)
        n_ranks, own_address = start.shape.n_ranks, self._frames.own_address
        numbers = ranks_of_node(start.config, n_ranks, self._config.node_rank)
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
            log = self._logs[number] = Log()
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

    def _begin(self, work: Callable[[], None]) -> None:
        """In a thread that ends soon after the connection has."""
        thread = threading.Thread(target=work, daemon=True, name="quire-node")
        self._threads.append(thread)
        thread.start()

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
            if not self._is_writing and time.monotonic() - self._heard_s > SILENT_S:
                self._why = f"it said nothing for {SILENT_S:g} s: its machine is down, or the network between"

    def _say_end(self, rank: LocalRank) -> None:
        loss, _ = rank.loss()
        has_words = rank.wait(0.0) not in (0, -signal.SIGKILL) and rank.number not in self._shown
        said = "" if not has_words else self._logs[rank.number].tail(BEAT_S)[-LAST_CHARS:]
        self._frames.send(Kind.ENDED, msgspec.msgpack.encode(RankEnded(rank.number, loss.message, loss.kind, said)))

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
    folder = find_checkpoint(config.model, config.revision, config.download_dir)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _tell_to_end)
    session: Session | None = None
    wait_s = COME_S
    try:
        while True:
            frames = _connect(config, wait_s, is_first=session is None)
            _greet(frames, config, folder)
            session = Session(frames, config, folder)
            logger.info("node 0 is there (%s)", frames.other_address)
            why = session.run()
            if session.is_last:
                logger.info("node 0 has ended its engine: this node ends too")
                return 0
            logger.error(
                "node 0 is lost (%s): its ranks here are ended; waiting %g s for its next engine", why, AGAIN_S
            )
            wait_s = AGAIN_S
    except _Ended:
        return 0
    except QuireError as error:
        logger.error("%s", error.message)
        return 1


def _tell_to_end(number: int, _: object) -> None:
    raise _Ended(f"it was told to ({signal.Signals(number).name})")


def _connect(config: EngineConfig, wait_s: float, *, is_first: bool) -> Frames:
    """Raises ConfigError if node 0 does not listen in time."""
    address, port = config.master_addr, config.master_port
    where, end_s, say_s = f"{address} port {port}", time.monotonic() + wait_s, time.monotonic() + TRY_S
    while True:
        try:
            frames = Frames(socket.create_connection((address, port), CONNECT_S))
            if frames.is_greeted(CONNECT_S):
                return frames
            raise ConfigError(f"{where} answers, but not as node 0 of Quire does: is it the --master-port of node 0?")
        except socket.gaierror as error:
            raise ConfigError(
                f"master_addr = {shown(address)} is not known here ({error.strerror}): give the address of node 0",
                param="master_addr",
            ) from None
        except OSError as error:
            now_s, why = time.monotonic(), error.strerror or str(error)
            if now_s > end_s:
                hint = (
                    "is node 0 started, with the same --master-addr and --master-port, and does a firewall let this"
                    " machine through?" if is_first else "its engine was not started again"
                )  # fmt: skip
                raise ConfigError(f"node 0 did not listen at {where} for {wait_s:g} s ({why}): {hint}") from None
            if now_s > say_s:
                logger.warning("waiting for node 0 at %s (%s)%s", where, why, loopback_hint(address))
                say_s = now_s + SAY_S
            time.sleep(TRY_S)


def _greet(frames: Frames, config: EngineConfig, folder: pathlib.Path) -> None:
    hello = Hello(config.node_rank, config.nnodes, socket.gethostname(), versions(), model_digest(folder))
    with contextlib.suppress(OSError):  # which is seen at once
        frames.greet()
        frames.send(Kind.HELLO, msgspec.msgpack.encode(hello))


def _check_alike(own: EngineConfig, of_first: EngineConfig) -> None:
    """ConfigError for an option that was given here, and is another one on node 0, whose options hold."""
    usual = EngineConfig()
    for name in EngineConfig.__struct_fields__:
        value, other = getattr(own, name), getattr(of_first, name)
        if name not in OWN_OPTIONS and value != getattr(usual, name) and value != other:
            raise ConfigError(
                f"{name} = {shown(value)} here, and {shown(other)} on node 0, whose options hold for all nodes: give"
                f" the same, or leave --{name.replace('_', '-')} out here",
                param=name,
            )


def main() -> int:
    """Entry point of a process that another one has started, and that ends with it: options come as its first line."""
    line, _ = read_start()
    be_killed_with_parent()
    return run_node(msgspec.json.decode(line, type=EngineConfig))


if __name__ == "__main__":
    sys.exit(main())
