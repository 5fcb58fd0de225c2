"""The other machines of an engine, seen from node 0: who comes, and what all are told.

Owns the port, and the store through which ranks find one another. Does not own what a node says of its ranks
(`remote.py`), when ranks are lost (`group.py`), nor what a node does (`node.py`).
Invariant: a node that is not alike in version, model, options or number, or whose number is taken, is refused, and told
why, as long as the engine lives.
"""

from __future__ import annotations

import errno
import logging
import pathlib
import socket
import threading
import time
from collections.abc import Callable
from typing import Final

import msgspec

from quire.compute.dist.meeting import host_store
from quire.compute.weights.hub import called
from quire.config.engine import EngineConfig
from quire.config.mesh import Mesh
from quire.core.events import EndKind
from quire.core.meeting import is_loopback, meeting_at
from quire.engine.executors.executor import RanksLost
from quire.engine.ranks.arrival import difference
from quire.engine.ranks.node_port import LOOK_S, close_listening, hello_of, likely_address, listening
from quire.engine.ranks.node_wire import Frames, Hello, Kind, NodeStart, Torn, model_digest, versions
from quire.engine.ranks.remote import RemoteNode, RemoteRank
from quire.engine.ranks.ring import RingWriter

logger = logging.getLogger("quire.engine")

COME_S: Final = 600.0
"""The other nodes have so long to come."""
SAY_S: Final = 30.0
"""So often the log says who is missing."""
MAX_STRANGERS: Final = 32
"""So many at once may not have said yet who they are; others wait to be let in."""


class Nodes:
    """All others. `start`, then `say` as often as there is something to do, at last `close`."""

    def __init__(self, config: EngineConfig, shape: Mesh, folder: pathlib.Path, *, is_server: bool) -> None:
        """folder: the checkpoint. Takes the port. Raises ConfigError if that cannot be."""
        self._config, self._shape, self._folder, self._is_server = config, shape, folder, is_server
        self._nodes: dict[int, RemoteNode] = {}
        self._n_strangers, self._is_complete, self._lock = 0, False, threading.Lock()
        """Of all three; a node that is lost once all were there is not replaced."""
        self._has_come = threading.Event()
        self.results: dict[int, RingWriter] = {}
        """Of each telling rank elsewhere, where to put what it says of steps."""
        self._address = config.master_addr
        self._listening = listening(config)
        self._store, self._store_port = host_store(str(self._listening.getsockname()[0]))
        self.meeting_point = meeting_at(self._address, self._store_port, self._address)
        """For the ranks of this node."""

    def start(self, is_over: Callable[[], bool]) -> list[RemoteRank]:
        """Wait for all nodes, and have them start their ranks; fewer where one was lost meanwhile, or it is over.
        RanksLost: not all have come."""
        threading.Thread(target=self._let_in, daemon=True, name="quire-door").start()
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

    def tell_loss(self, why: str) -> None:
        """The engine cannot go on, and `close` follows."""
        for node in self._nodes.values():
            node.tell_loss(why)

    def close(self) -> None:
        """End all connections, and whatever waits in one (idempotent)."""
        with self._lock:
            close_listening(self._listening)
        for node in list(self._nodes.values()):
            node.close()

    def _await_all(self, is_over: Callable[[], bool]) -> None:
        end_s, say_s = time.monotonic() + COME_S, 0.0
        while not is_over() and (missing := self._missing()):
            now_s = time.monotonic()
            if now_s > end_s:
                raise RanksLost(f"{_names(missing)} did not come to {self._where} in {COME_S:g} s", EndKind.FAILED)
            if now_s > say_s:
                if not say_s and is_loopback(self._address):
                    self._say_alone()
                logger.warning(
                    "waiting at %s for %s, at most %.0f s more; start it there: %s", self._where, _names(missing),
                    end_s - now_s, self._command(missing[0]),
                )  # fmt: skip
                say_s = now_s + SAY_S
            self._has_come.wait(LOOK_S)
            self._has_come.clear()

    def _say_alone(self) -> None:
        likely = likely_address()
        logger.warning(
            "node 0 waits at %s, which only this machine reaches: for nodes on other machines give --master-addr, an"
            " address of this one%s, to all of them", self._where, f" ({likely}?)" if likely else "",
        )  # fmt: skip

    def _missing(self) -> list[int]:
        """Who has not come, or has gone again; nobody: they are complete."""
        with self._lock:
            self._forget_lost()
            missing = [number for number in range(1, self._config.nnodes) if number not in self._nodes]
            self._is_complete = not missing
            return missing

    def _forget_lost(self) -> None:
        """With the lock, while others are missing: who has gone may come again."""
        for number, node in list(self._nodes.items()):
            if node.is_lost:
                logger.error("%s has gone again before the others came", node.name)
                node.close()
                del self._nodes[number]

    def _let_in(self) -> None:
        """The thread that hears who comes; until nobody listens."""
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError as error:
                if self._listening.fileno() < 0 or error.errno == errno.EINVAL:  # closed: it is over
                    return
                logger.error("nobody can come to %s (%s)", self._where, error.strerror)
                time.sleep(LOOK_S)
                continue
            with self._lock:
                self._n_strangers += 1
            threading.Thread(target=self._receive, args=(connection,), daemon=True, name="quire-hello").start()
            while self._n_strangers == MAX_STRANGERS:
                time.sleep(LOOK_S)

    def _receive(self, connection: socket.socket) -> None:
        """Somebody has come. A thread hears who, so that one who says nothing keeps nobody waiting."""
        try:
            self._meet(Frames(connection))
        except OSError:  # it has gone at once
            connection.close()
        finally:
            with self._lock:
                self._n_strangers -= 1

    def _meet(self, frames: Frames) -> None:
        level = logging.DEBUG if self._is_complete else logging.ERROR  # a port that is looked at now and then
        try:
            hello = hello_of(frames)
            level = logging.ERROR
            with self._lock:
                if not self._is_complete:
                    self._forget_lost()
                objection = self._objection(hello)
                if not objection:
                    self._nodes[hello.node] = node = RemoteNode(frames, hello, self.results)
                    logger.info("%s is there", node.name)
                    self._has_come.set()
                    return
            frames.send(Kind.REFUSED, objection.encode())
        except (OSError, msgspec.DecodeError) as error:
            objection = str(error)
        logger.log(level, "%s came to %s and is refused: %s", frames.other_address, self._where, objection)
        frames.close()

    def _objection(self, hello: Hello) -> str:
        """Why a node is not wanted; empty if it is. Torn: it may come to the next engine."""
        n = self._config.nnodes
        if hello.n_nodes != n or not 0 < hello.node < n:
            return f"it has --nnodes {hello.n_nodes} --node-rank {hello.node}, and node 0 has --nnodes {n}"
        there = self._nodes.get(hello.node)
        if there is not None and not there.is_lost:
            others = f"give this one another, up to {n - 1}, or" if n > 2 else "of --nnodes 2 it is the only other one:"
            return f"--node-rank {hello.node} is taken by {there.name}: {others} end that one first"
        if self._is_complete or self._listening.fileno() < 0:
            raise Torn("no more nodes are waited for by this engine")
        own = versions()
        other = [f"{name} {hello.versions.get(name)}, and node 0 has {one}" for name, one in own.items()
                 if hello.versions.get(name) != one]  # fmt: skip
        if other:
            return f"it has {'; '.join(other)}: install one version on all nodes"
        if hello.model != model_digest(self._folder):
            return f"its model is another one than {called(str(self._folder))} of node 0: give both the same files"
        return difference(hello.options, self._config)

    @property
    def _where(self) -> str:
        return f"{self._address} port {self._config.master_port}"

    def _command(self, number: int) -> str:
        config = self._config
        return (
            f"quire serve {config.model or 'demo'} --nnodes {config.nnodes} --node-rank {number} --master-addr"
            f" {config.master_addr} --master-port {config.master_port} --headless"
        )


def _names(numbers: list[int]) -> str:
    return ", ".join(f"node {number}" for number in numbers)
