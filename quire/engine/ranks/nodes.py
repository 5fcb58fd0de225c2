"""The other machines of an engine, seen from node 0: who comes, what they are told, what they say of their ranks.

Owns the port at which they come, the connections, and the store through which ranks find one another. Does not own when
ranks are lost (`group.py`), nor what a node does (`node.py`).
Invariants: a node that is not alike in version, model or number is refused, and told why; a node that is silent, or
whose connection ends, is the end of all its ranks; nobody who speaks to a node waits for one that is lost.
"""

from __future__ import annotations

import logging
import os
import pathlib
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Final

import msgspec

from quire.compute.dist.meeting import host_store
from quire.compute.weights.hub import called
from quire.config.engine import EngineConfig
from quire.config.mesh import Mesh
from quire.core.errors import ConfigError, shown
from quire.core.events import EndKind
from quire.core.meeting import loopback_hint, meeting_at
from quire.engine.child import DUMP_S
from quire.engine.executors.executor import RanksLost
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
    decode_standings,
    model_digest,
    versions,
)
from quire.engine.ranks.ring import STARTING, RingWriter, Standing
from quire.engine.ranks.start import RankFailed

logger = logging.getLogger("quire.engine")

COME_S: Final = 600.0
"""The other nodes have so long to come."""
SAY_S: Final = 30.0
"""So often the log says who is missing."""
HELLO_S: Final = 5.0
START_S: Final = 20.0
"""For a node to start processes, which load nothing yet."""
LOOK_S: Final = 0.1
ANSWER_S: Final = 2.0
"""For stacks on their way."""


class RemoteRank:
    """One rank of another node; as `member.LocalRank` is of this one."""

    def __init__(self, number: int, pid: int, node: RemoteNode) -> None:
        self.number, self.pid, self._node = number, pid, node
        self.status_fd, self._writing = os.pipe()
        self._lock, self._gone = threading.Lock(), threading.Event()

    @property
    def name(self) -> str:
        """As messages call it."""
        return f"rank {self.number} (process {self.pid} on {self._node.name})"

    def standing(self) -> Standing:
        """Where it is, as its node said last."""
        return self._node.standing(self.number)

    def state_words(self) -> str:
        """See `LocalRank`; only its own machine knows."""
        return ""

    def has_ended(self, why: RankFailed) -> None:
        """Its node says so, or is lost."""
        with self._lock:
            if self._writing >= 0 and not self._gone.is_set():
                os.write(self._writing, msgspec.json.encode(why) + b"\n")
        self._gone.set()

    def loss(self) -> tuple[RanksLost, bool]:
        """See `LocalRank`."""
        why = msgspec.json.decode(os.read(self.status_fd, 65536), type=RankFailed)
        return RanksLost(why.message, why.kind), why.kind is EndKind.CRASH

    def show_stacks(self) -> None:
        """See `LocalRank`: they come over the connection."""
        logger.error("the stacks of rank %d follow", self.number)
        text = self._node.stacks_of(self.number)
        _show(text or "nothing came: its node does not answer")

    def wait(self, limit_s: float) -> int | None:
        """See `LocalRank`."""
        return 0 if self._gone.wait(limit_s) else None

    def end(self) -> None:
        """Free everything. Its node ends it, when the connection ends."""
        with self._lock:
            os.close(self.status_fd)
            os.close(self._writing)
            self._writing = -1


class RemoteNode:
    """One connection."""

    def __init__(self, frames: Frames, hello: Hello, results: dict[int, RingWriter]) -> None:
        """results: see `Nodes`."""
        self.number, self.address = hello.node, frames.other_address
        self.name = f"node {hello.node} ({hello.host}, {frames.other_address})"
        self.heard_s = time.monotonic()
        """When it said something last."""
        self.is_lost, self.why = False, ""
        self.ranks: list[RemoteRank] = []
        self._results = results
        self._frames = frames
        self._standings: dict[int, Standing] = {}
        self._leaves = ""
        self._stacks, self._answered = "", threading.Event()
        self._started = threading.Event()
        for work in (self._read, self._beat):
            threading.Thread(target=work, daemon=True, name="quire-node").start()

    def start(self, start: NodeStart, is_over: Callable[[], bool]) -> None:
        """Have it start its ranks, and wait until they are processes, or it is lost, or all is over."""
        self.send(Kind.START, msgspec.msgpack.encode(start))
        end_s = time.monotonic() + START_S
        while not self._started.wait(LOOK_S) and not self.is_lost and not is_over():
            if time.monotonic() > end_s:
                self.lose(f"did not start its ranks in {START_S:g} s")

    def send(self, kind: Kind, body: bytes = b"") -> None:
        """To a lost node nothing goes, which is known anyway."""
        try:
            self._frames.send(kind, body)
        except OSError:
            return

    def standing(self, rank: int) -> Standing:
        """Of one of its ranks, with the silence of the node itself."""
        found = self._standings.get(rank)
        silent_s = time.monotonic() - self.heard_s
        return (
            Standing(STARTING, silent_s, 0, 0) if found is None else found._replace(silent_s=found.silent_s + silent_s)
        )

    def stacks_of(self, rank: int) -> str:
        """What it writes when it is ended now; empty if nothing comes."""
        self._answered.clear()
        self.send(Kind.STACKS, rank.to_bytes(2))
        self._answered.wait(DUMP_S + ANSWER_S)
        return self._stacks

    def lose(self, why: str) -> None:
        """All its ranks are lost."""
        self.is_lost, self.why = True, why
        for rank in self.ranks:
            rank.has_ended(RankFailed(f"{self.name} {why}", EndKind.KILLED))

    def close(self) -> None:
        """End the connection; the node ends its ranks."""
        self._frames.cut()

    def _beat(self) -> None:
        while not self.is_lost:
            self.send(Kind.BEAT)
            time.sleep(BEAT_S)

    def _read(self) -> None:
        try:
            while True:
                kind, body = self._frames.receive()
                self._hear(kind, body)
                self.heard_s = time.monotonic()
        except (OSError, msgspec.DecodeError) as error:
            why = str(error) if isinstance(error, (Torn, msgspec.DecodeError)) else error.strerror or str(error)
            self.lose(self._leaves or f"is lost ({why}): start it there again")
        except RanksLost:  # who reads results is gone
            self.is_lost = True
        finally:
            self._frames.close()

    def _hear(self, kind: Kind, body: bytes) -> None:
        match kind:
            case Kind.STANDINGS:
                self._standings = decode_standings(body)
            case Kind.RESULT:
                self._results[int.from_bytes(body[:2])].put(body[2:])
            case Kind.STARTED:
                pids = msgspec.msgpack.decode(body, type=Started).pids
                self.ranks = [RemoteRank(number, pid, self) for number, pid in sorted(pids.items())]
                self._started.set()
            case Kind.ENDED:
                ended = msgspec.msgpack.decode(body, type=RankEnded)
                if ended.said:
                    logger.error("what rank %d on %s wrote at last follows", ended.rank, self.name)
                    _show(ended.said)
                for rank in self.ranks:
                    if rank.number == ended.rank:
                        rank.has_ended(RankFailed(ended.message, ended.kind))
            case Kind.STACKS_OF:
                self._stacks = msgspec.msgpack.decode(body, type=StacksOf).text
                self._answered.set()
            case Kind.LEAVES:
                self._leaves = body.decode(errors="replace")


class Nodes:
    """All others. `start`, then `say` as often as there is something to do, at last `close`."""

    def __init__(self, config: EngineConfig, shape: Mesh, folder: pathlib.Path, *, is_server: bool) -> None:
        """folder: the checkpoint. Takes the port. Raises ConfigError if that cannot be."""
        self._config, self._shape, self._folder, self._is_server = config, shape, folder, is_server
        self._nodes: dict[int, RemoteNode] = {}
        self.results: dict[int, RingWriter] = {}
        """Of each telling rank elsewhere, where to put what it says of steps."""
        self._address = config.master_addr
        self._listening = _listening(config)
        self._store, self._store_port = host_store(str(self._listening.getsockname()[0]))
        self.meeting_point = meeting_at(self._address, self._store_port, self._address)
        """For the ranks of this node."""

    def start(self, is_over: Callable[[], bool]) -> list[RemoteRank]:
        """Wait for all nodes, and have them start their ranks; fewer where one was lost meanwhile, or it is over.
        RanksLost: not all have come."""
        self._await_all(is_over)
        start = NodeStart(self._shape, self._config, self._address, self._store_port, self._is_server)
        for _, node in sorted(self._nodes.items()):
            node.start(start, is_over)
            if node.is_lost:
                raise RanksLost(f"{node.name} {node.why}", EndKind.FAILED)
        return [rank for _, node in sorted(self._nodes.items()) for rank in node.ranks]

    def say(self, data: bytes) -> None:
        """To every rank of every node."""
        for node in self._nodes.values():
            node.send(Kind.SAID, data)

    def silent(self, limit_s: float) -> str:
        """Which nodes have said nothing for longer; mostly none."""
        now_s = time.monotonic()
        return ", ".join(node.name for node in self._nodes.values() if now_s - node.heard_s > limit_s)

    def pardon(self) -> None:
        """This process did not run for a while, and has heard nobody."""
        for node in self._nodes.values():
            node.heard_s = time.monotonic()

    def dismiss(self) -> None:
        """The engine is ended, and none will follow."""
        for node in self._nodes.values():
            node.send(Kind.BYE)

    def close(self) -> None:
        """End all connections, and whatever waits in one (idempotent)."""
        self._listening.close()
        for node in list(self._nodes.values()):
            node.close()

    def _await_all(self, is_over: Callable[[], bool]) -> None:
        end_s, say_s = time.monotonic() + COME_S, 0.0
        while not is_over():
            for number, node in list(self._nodes.items()):
                if node.is_lost:
                    logger.error("%s has gone again before the others came", node.name)
                    node.close()
                    del self._nodes[number]
            missing = [number for number in range(1, self._config.nnodes) if number not in self._nodes]
            if not missing:
                self._listening.close()
                return
            now_s = time.monotonic()
            if now_s > end_s:
                raise RanksLost(f"{_names(missing)} did not come to {self._where} in {COME_S:g} s", EndKind.FAILED)
            if now_s > say_s:
                hint = loopback_hint(self._address)
                logger.warning("waiting for %s; there: %s%s", _names(missing), self._command(missing[0]), hint)
                say_s = now_s + SAY_S
            try:
                connection, _ = self._listening.accept()
            except TimeoutError:
                continue
            except OSError:  # closed: it is over
                return
            self._receive(connection)

    def _receive(self, connection: socket.socket) -> None:
        """Somebody has come."""
        frames = Frames(connection)
        try:
            frames.greet()
            if not frames.is_greeted(HELLO_S):
                raise Torn("it does not say that it is a node")
            kind, body = frames.receive(HELLO_S)
            if kind is not Kind.HELLO:
                raise Torn(f"it begins with {kind.name}")
            hello = msgspec.msgpack.decode(body, type=Hello)
            objection = self._objection(hello)
            if objection:
                frames.send(Kind.REFUSED, objection.encode())
        except (OSError, msgspec.DecodeError) as error:
            objection = str(error)
        if objection:
            logger.error("%s came to %s and is refused: %s", frames.other_address, self._where, objection)
            frames.close()
            return
        self._nodes[hello.node] = node = RemoteNode(frames, hello, self.results)
        logger.info("%s is there", node.name)

    def _objection(self, hello: Hello) -> str:
        """Why a node is not wanted; empty if it is."""
        n = self._config.nnodes
        if hello.n_nodes != n or not 0 < hello.node < n:
            return f"it has --nnodes {hello.n_nodes} --node-rank {hello.node}, and node 0 has --nnodes {n}"
        if hello.node in self._nodes:
            return f"{self._nodes[hello.node].name} is there already: give each node its own --node-rank"
        own = versions()
        other = [f"{name} {hello.versions.get(name)}, and node 0 has {one}" for name, one in own.items()
                 if hello.versions.get(name) != one]  # fmt: skip
        if other:
            return f"it has {'; '.join(other)}: install one version on all nodes"
        if hello.model != model_digest(self._folder):
            return f"its model is another one than {called(str(self._folder))} of node 0: give both the same files"
        return ""

    @property
    def _where(self) -> str:
        return f"{self._address} port {self._config.master_port}"

    def _command(self, number: int) -> str:
        config = self._config
        return (
            f"quire serve {config.model or 'demo'} --nnodes {config.nnodes} --node-rank {number} --master-addr"
            f" {config.master_addr} --master-port {config.master_port} --headless"
        )


def _show(text: str) -> None:
    """Lines of another machine's log, in this one's; what no terminal should see is escaped."""
    for line in text.splitlines():
        print("  " + "".join(c if c.isprintable() or c == "\t" else ascii(c)[1:-1] for c in line), file=sys.stderr)


def _names(numbers: list[int]) -> str:
    return ", ".join(f"node {number}" for number in numbers)


def _listening(config: EngineConfig) -> socket.socket:
    """Raises ConfigError where the address is none of this machine, or the port is taken."""
    address, port = config.master_addr, config.master_port
    try:
        family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
        found = socket.create_server((address, port), family=family)
    except socket.gaierror as error:
        raise ConfigError(
            f"master_addr = {shown(address)} is not known here ({error.strerror}): give an address of this machine, at"
            " which the other nodes reach it", param="master_addr",
        ) from None  # fmt: skip
    except OSError as error:
        raise ConfigError(
            f"master_addr = {shown(address)}, master_port = {port} cannot be listened on"
            f" ({os.strerror(error.errno or 0)}): give an address of this machine, at which the other nodes reach it,"
            " and a port that is free", param="master_port",
        ) from None  # fmt: skip
    found.settimeout(LOOK_S)
    return found
