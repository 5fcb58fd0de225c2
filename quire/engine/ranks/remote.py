"""One other machine and its ranks, as node 0 sees them over the connection between the two.

Owns what has been heard, and the pipes by which a rank's end is seen. Does not own who may come (`nodes.py`), nor when
ranks are lost (`group.py`).
Invariant: a node that is silent, or whose connection ends, is the end of all its ranks; nobody who speaks to a node
waits for one that is lost.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Final

import msgspec

from quire.config.nodes import ranks_of_node
from quire.core.events import EndKind
from quire.engine.child import DUMP_S
from quire.engine.executors.executor import RanksLost
from quire.engine.ranks.node_port import LOOK_S
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
)
from quire.engine.ranks.ring import STARTING, RingWriter, Standing

logger = logging.getLogger("quire.engine")

START_S: Final = 20.0
"""For a node to start processes, which load nothing yet."""
ANSWER_S: Final = 2.0
"""For stacks on their way."""


class RemoteRank:
    """One rank of another node; as `member.LocalRank` is of this one."""

    def __init__(self, number: int, pid: int, node: RemoteNode) -> None:
        self.number, self.pid, self._node = number, pid, node
        self.status_fd, self._writing = os.pipe()
        self._lock, self._gone = threading.Lock(), threading.Event()
        self._loss: tuple[RanksLost, bool] | None = None

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

    def has_ended(self, loss: RanksLost, *, may_be_another: bool) -> None:
        """Its node says so, or is lost. What is said first counts."""
        with self._lock:
            if self._loss is None:
                self._loss = loss, may_be_another
                if self._writing >= 0:
                    os.write(self._writing, b"\n")
        self._gone.set()

    def loss(self) -> tuple[RanksLost, bool]:
        """See `LocalRank`."""
        assert self._loss is not None
        return self._loss

    def show_stacks(self) -> None:
        """See `LocalRank`: they come over the connection."""
        logger.error("the stacks of rank %d follow", self.number)
        text = self._node.stacks_of(self.number)
        _show(text or "nothing came: its node does not answer")

    def wait(self, limit_s: float) -> int | None:
        """See `LocalRank`."""
        return 0 if self._gone.wait(limit_s) else None

    def end(self) -> None:
        """Free everything (idempotent). Its node ends it, when the connection ends."""
        with self._lock:
            for fd in (self.status_fd, self._writing):
                if fd >= 0:
                    os.close(fd)
            self.status_fd = self._writing = -1


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
        self._expected, self._is_closed, self._lock = range(0), False, threading.Lock()
        """Ranks that it is to start; none once it is closed."""
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
        self._expected = ranks_of_node(start.config, start.shape.n_ranks, self.number)
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
            rank.has_ended(RanksLost(f"{self.name} {why}", EndKind.KILLED), may_be_another=False)

    def tell_loss(self, why: str) -> None:
        """The engine cannot go on. Waits for nothing; `close` follows."""
        self._frames.send_at_once(Kind.LOST, why.encode())

    def close(self) -> None:
        """End the connection, and free what was kept of its ranks (idempotent); the node ends them."""
        self._frames.cut()
        with self._lock:
            self._is_closed = True
            for rank in self.ranks:
                rank.end()

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
        finally:
            self._frames.close()

    def _hear(self, kind: Kind, body: bytes) -> None:
        match kind:
            case Kind.STANDINGS:
                self._standings = decode_standings(body)
            case Kind.RESULT:
                number = int.from_bytes(body[:2])
                if number not in self._results:
                    raise Torn(f"it tells results of rank {number}, which has none to tell")
                with contextlib.suppress(RanksLost):  # who reads them is gone, and about to say so
                    self._results[number].put(body[2:])
            case Kind.STARTED:
                self._take_ranks(msgspec.msgpack.decode(body, type=Started).pids)
            case Kind.ENDED:
                self._hear_end(msgspec.msgpack.decode(body, type=RankEnded))
            case Kind.STACKS_OF:
                self._stacks = msgspec.msgpack.decode(body, type=StacksOf).text
                self._answered.set()
            case Kind.LEAVES:
                self._leaves = body.decode(errors="replace")

    def _take_ranks(self, pids: dict[int, int]) -> None:
        """It has started these. Torn: it was not asked for them."""
        if self.ranks or sorted(pids) != list(self._expected):
            raise Torn(f"it says that it has started ranks {sorted(pids)}")
        with self._lock:
            if not self._is_closed:
                for number, pid in sorted(pids.items()):
                    self.ranks.append(RemoteRank(number, pid, self))
        self._started.set()

    def _hear_end(self, ended: RankEnded) -> None:
        if ended.said:
            logger.error("what rank %d on %s wrote at last follows", ended.rank, self.name)
            _show(ended.said)
        for rank in self.ranks:
            if rank.number == ended.rank:
                rank.has_ended(RanksLost(ended.message, ended.kind), may_be_another=ended.may_be_another)


def _show(text: str) -> None:
    """Lines of another machine's log, in this one's; what no terminal should see is escaped."""
    for line in text.splitlines():
        print("  " + "".join(c if c.isprintable() or c == "\t" else ascii(c)[1:-1] for c in line), file=sys.stderr)
