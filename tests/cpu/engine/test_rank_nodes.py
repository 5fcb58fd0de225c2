"""How nodes meet: who is refused, and why; what is said when one is silent or nobody comes. The other end is written by
hand here; whole engines are in tests/dist/test_node_engines.py."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import pathlib
import re
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from quire.cli.serve import _is_headless
from quire.config.engine import EngineConfig
from quire.config.mesh import Mesh, mesh_of
from quire.core.errors import ConfigError
from quire.core.events import EndKind
from quire.core.meeting import Meeting, meeting_at, meeting_of, own_address
from quire.engine.executors.executor import RanksLost
from quire.engine.ranks import group, node, node_port, nodes
from quire.engine.ranks.node_wire import (
    MAGIC,
    Frames,
    Hello,
    Kind,
    NodeStart,
    RankEnded,
    Started,
    encode_standings,
    model_digest,
    versions,
)
from quire.engine.ranks.nodes import Nodes
from quire.engine.ranks.results import N_ENDS
from quire.engine.ranks.ring import STEPPING, RankMemory, RingWriter, Standing
from quire.engine.ranks.start import RankStart
from quire.serve.config import ServerConfig

HERE = "127.0.0.1"
DEMO = pathlib.Path(nodes.__file__).parents[2] / "_models" / "demo"


@pytest.fixture
def port() -> int:
    with socket.create_server((HERE, 0)) as found:
        return int(found.getsockname()[1])


@pytest.fixture
def config(port: int) -> EngineConfig:
    return EngineConfig(pipeline_parallel_size=2, nnodes=2, master_port=port)


@pytest.fixture
def head(config: EngineConfig) -> Iterator[Nodes]:
    made = Nodes(config, Mesh(pp=2), DEMO, is_server=False)
    yield made
    made.close()


def hello(**changes: Any) -> Hello:
    return msgspec.structs.replace(Hello(1, 2, "other", versions(), model_digest(DEMO)), **changes)


def come(port: int, said: Hello) -> Frames:
    """A node that has said who it is."""
    frames = Frames(socket.create_connection((HERE, port)))
    assert frames.is_greeted(5)
    frames.greet()
    frames.send(Kind.HELLO, msgspec.msgpack.encode(said))
    return frames


def answer(frames: Frames) -> tuple[Kind, bytes]:
    """What node 0 says but that it lives."""
    for _ in range(100):
        kind, body = frames.receive(10)
        if kind is not Kind.BEAT:
            return kind, body
    raise TimeoutError("nothing came but signs of life")


def started(head: Nodes) -> threading.Thread:
    def start() -> None:
        with contextlib.suppress(RanksLost):  # the node that has come says no more
            head.start(lambda: False)

    thread = threading.Thread(target=start, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("changes, message", [
    ({"n_nodes": 3}, "it has --nnodes 3 --node-rank 1, and node 0 has --nnodes 2"),
    ({"node": 2}, "it has --nnodes 2 --node-rank 2, and node 0 has --nnodes 2"),
    ({"node": 0}, "it has --nnodes 2 --node-rank 0"),
    ({"versions": {**versions(), "quire": "0.0.1"}}, "it has quire 0.0.1, and node 0 has .*: install one version"),
    ({"versions": {}}, "it has quire None, and node 0 has .*; torch None, and"),
    ({"model": "another"}, "its model is another one than .*demo of node 0: give both the same files"),
])  # fmt: skip
def test_a_node_that_is_not_alike_is_refused_and_told_why(
    changes: dict[str, Any], message: str, head: Nodes, port: int, caplog: pytest.LogCaptureFixture
) -> None:
    started(head)
    kind, body = answer(come(port, hello(**changes)))
    assert kind is Kind.REFUSED and re.match(message, body.decode())
    right = come(port, hello())
    assert answer(right)[0] is Kind.START, "node 0 still waits for the right one"
    assert "is refused: " + body.decode() in caplog.text


@pytest.mark.parametrize("sent", [b"GET / HTTP/1.1\r\n\r\n", b"", MAGIC + b"\xff" * 5, MAGIC + b"\1\0\0\0\x06x"])
def test_who_is_no_node_is_refused(sent: bytes, head: Nodes, port: int, caplog: pytest.LogCaptureFixture) -> None:
    started(head)
    with socket.create_connection((HERE, port)) as stranger:
        stranger.sendall(sent)
        stranger.shutdown(socket.SHUT_WR)
        while stranger.recv(100):
            pass
    assert answer(come(port, hello()))[0] is Kind.START
    assert "and is refused" in caplog.text


def test_who_has_gone_at_once_keeps_nobody_waiting_and_ends_nothing(head: Nodes, port: int) -> None:
    """As who looks for open ports does: it resets its connection before it is let in."""
    with socket.create_connection((HERE, port)) as scanner:
        scanner.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    started(head)
    assert answer(come(port, hello()))[0] is Kind.START


def test_who_says_nothing_or_little_keeps_nobody_waiting(
    head: Nodes, port: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(node_port, "HELLO_S", 600.0)  # all of these would have the time
    started(head)
    with contextlib.ExitStack() as strangers:
        for sent in (b"", b"quire", MAGIC, MAGIC + b"\1"):
            stranger = strangers.enter_context(socket.create_connection((HERE, port)))
            stranger.sendall(sent)
        assert answer(come(port, hello()))[0] is Kind.START


def test_a_stranger_who_goes_on_slowly_has_no_more_time() -> None:
    with socket.create_server((HERE, 0)) as listening:
        client = socket.create_connection(listening.getsockname())
        frames = Frames(listening.accept()[0])
        stop = threading.Event()

        def drip() -> None:
            with contextlib.suppress(OSError):
                client.sendall(struct.pack("<IB", 4096, Kind.HELLO))
                while not stop.wait(0.02):
                    client.sendall(b"x")

        threading.Thread(target=drip, daemon=True).start()
        with pytest.raises(TimeoutError):
            frames.receive(0.1)
        stop.set()
        frames.close()
        client.close()


def test_a_hello_is_short(head: Nodes, port: int, caplog: pytest.LogCaptureFixture) -> None:
    started(head)
    with socket.create_connection((HERE, port)) as stranger:
        stranger.sendall(MAGIC + struct.pack("<IB", 1 << 20, Kind.HELLO))
        while stranger.recv(100):
            pass
    assert "a frame of kind 6 with 1048576 bytes (at most 4096) is none of Quire's" in caplog.text


def test_a_second_node_of_a_number_is_refused(port: int) -> None:
    head = Nodes(EngineConfig(pipeline_parallel_size=3, nnodes=3, master_port=port), Mesh(pp=3), DEMO, is_server=False)
    started(head)
    first = come(port, hello(n_nodes=3))
    kind, body = answer(come(port, hello(n_nodes=3)))
    assert kind is Kind.REFUSED and b"is there already: give each node its own --node-rank" in body
    third = come(port, hello(n_nodes=3, node=2))
    assert answer(first)[0] is Kind.START
    first.send(Kind.STARTED, msgspec.msgpack.encode(Started({1: 11})))
    assert answer(third)[0] is Kind.START
    head.close()


def test_nobody_comes(
    head: Nodes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, port: int
) -> None:
    monkeypatch.setattr(nodes, "COME_S", 0.2)
    with pytest.raises(RanksLost, match=rf"node 1 did not come to 127.0.0.1 port {port} in 0.2 s"):
        head.start(lambda: False)
    assert f"waiting for node 1; there: quire serve demo --nnodes 2 --node-rank 1 --master-addr {HERE}" in caplog.text
    assert "(127.0.0.1 is reached from its own machine alone: for others give --master-addr)" in caplog.text


def run_group(config: EngineConfig, port: int, act: Callable[[Frames], None]) -> RanksLost:
    """How a group of ranks is lost of which the other node does this, after its rank is at a step."""
    ranks = group.RankGroup(config, mesh_of(config), DEMO)
    starting = threading.Thread(target=lambda: ranks._live(), daemon=True)
    starting.start()
    frames = come(port, hello())
    kind, body = answer(frames)
    start = msgspec.msgpack.decode(body, type=NodeStart)
    assert kind is Kind.START and start.config == config and start.shape.pp == 2
    frames.send(Kind.STARTED, msgspec.msgpack.encode(Started({1: 4711})))
    frames.send(Kind.STANDINGS, encode_standings({1: Standing(STEPPING, 0.1, 3, 2, 10, 0)}))
    act(frames)
    assert ranks._lost.wait(20) and ranks.loss is not None and ranks.pids == []
    ranks.stop()
    return ranks.loss


def test_a_node_that_says_nothing_is_named(config: EngineConfig, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "LOST_S", 0.6)
    monkeypatch.setattr(group, "LATE_S", 0.2)
    loss = run_group(config, port, lambda frames: None)
    assert (
        loss.message == "node 1 (other, 127.0.0.1) said nothing for 0.6 s: its machine is down, or the network between"
    )
    assert loss.kind is EndKind.KILLED, "no request did that"


def test_a_rank_elsewhere_ends_in_its_own_words(
    config: EngineConfig, port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = RankEnded(1, "rank 1 ran out of memory (why)", EndKind.KILLED, "Traceback\n\x1b[31mit")
    loss = run_group(config, port, lambda frames: frames.send(Kind.ENDED, msgspec.msgpack.encode(ended)))
    assert (loss.message, loss.kind) == ("rank 1 ran out of memory (why)", EndKind.KILLED)
    assert "  Traceback\n  \\x1b[31mit\n" in capsys.readouterr().err


def test_a_node_that_leaves_says_why(config: EngineConfig, port: int) -> None:
    def leave(frames: Frames) -> None:
        frames.send(Kind.LEAVES, b"ends: it was told to (SIGINT)")
        frames.close()

    assert run_group(config, port, leave).message == "node 1 (other, 127.0.0.1) ends: it was told to (SIGINT)"
    assert "is lost (the connection was closed): start it there again" in run_group(config, port, Frames.close).message


@pytest.mark.parametrize("address, message", [
    ("no.such.host.invalid", "master_addr = 'no.such.host.invalid' is not known here"),
    ("192.0.2.1", "master_addr = '192.0.2.1', master_port = .* cannot be listened on .*: give an address of this"),
])  # fmt: skip
def test_an_address_of_another_machine_is_no_place_for_node_0(address: str, message: str, config: EngineConfig) -> None:
    config.master_addr = address
    with pytest.raises(ConfigError, match=message):
        Nodes(config, Mesh(pp=2), DEMO, is_server=False)


def test_an_engine_is_on_node_0_and_others_do_not_wait_for_themselves(config: EngineConfig) -> None:
    config.node_rank = 1
    with pytest.raises(
        ConfigError, match=r"node_rank = 1, and an engine is on node 0: leave node_rank out"
    ):
        Nodes(config, Mesh(pp=2), DEMO, is_server=False)


def test_a_taken_port_is_named(head: Nodes, config: EngineConfig, port: int) -> None:
    with pytest.raises(ConfigError, match=rf"master_port = {port} cannot be listened on \(Address already in use\)"):
        Nodes(config, Mesh(pp=2), DEMO, is_server=False)


def run_node(config: EngineConfig, caplog: pytest.LogCaptureFixture, **changes: Any) -> tuple[int, str]:
    """Its exit status, and what it says."""
    code = node.run_node(msgspec.structs.replace(config, node_rank=1, **changes))
    return code, caplog.text


@pytest.fixture
def as_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Signals and the log stay the tests'."""
    monkeypatch.setattr(node.logs, "set_up", lambda who: logging.getLogger("quire").setLevel(logging.INFO))
    monkeypatch.setattr(node.signal, "signal", lambda number, handler: None)
    monkeypatch.setattr(node, "TRY_S", 0.02)


@pytest.mark.usefixtures("as_a_program")
def test_a_node_that_meets_nobody_ends(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(node, "COME_S", 0.1)
    code, said = run_node(config, caplog)
    assert code == 1 and "did not answer at 127.0.0.1 port" in said and "is node 0 started, with the same" in said
    code, said = run_node(config, caplog, master_addr="no.such.host.invalid")
    assert code == 1 and "'no.such.host.invalid' is not known here" in said


@pytest.mark.usefixtures("as_a_program")
def test_a_node_at_a_port_of_something_else_ends(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server((HERE, config.master_port)) as other:

        def answer_once() -> None:
            connection, _ = other.accept()
            with connection:
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        threading.Thread(target=answer_once, daemon=True).start()
        code, said = run_node(config, caplog)
    assert code == 1 and "answers, but not as node 0 of Quire does: is it the --master-port of node 0?" in said


@pytest.mark.usefixtures("as_a_program")
def test_a_node_waits_for_a_port_that_says_nothing_yet(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Node 0 has it before its device is ready, and nobody is let in."""
    where = (HERE, config.master_port)
    monkeypatch.setattr(node, "CONNECT_S", 0.1)
    with socket.create_server(where), monkeypatch.context() as short:
        short.setattr(node, "COME_S", 0.2)
        code, said = run_node(config, caplog)
    assert code == 1 and f"did not answer at {HERE} port {config.master_port} for 0.2 s (timed out)" in said

    monkeypatch.setattr(node, "CONNECT_S", 5.0)
    listening = socket.create_server(where)

    def come_round() -> None:
        listening.accept()[0].close()
        Head(config.master_port, Kind.BYE, b"", listening)

    threading.Thread(target=come_round, daemon=True).start()
    assert run_node(config, caplog)[0] == 0


class Head(threading.Thread):
    """A node 0 that says one thing to whoever comes first, and closes the port."""

    def __init__(self, port: int, kind: Kind, body: bytes, listening: socket.socket | None = None) -> None:
        super().__init__(daemon=True)
        self.said: list[tuple[Kind, bytes]] = []
        """To START."""
        self._listening, self._kind, self._body = listening or socket.create_server((HERE, port)), kind, body
        self.start()

    def run(self) -> None:
        connection, _ = self._listening.accept()
        self._listening.close()
        frames = Frames(connection)
        frames.greet()
        assert frames.is_greeted(5) and frames.receive(5)[0] is Kind.HELLO
        frames.send(self._kind, self._body)
        with contextlib.suppress(OSError):
            while self._kind is Kind.START:
                self.said.append(frames.receive(5))
        frames.close()


@pytest.mark.usefixtures("as_a_program")
def test_a_node_ends_as_node_0_wishes(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(node, "AGAIN_S", 0.1)
    Head(config.master_port, Kind.REFUSED, b"another model")
    assert run_node(config, caplog)[0] == 1 and "node 0 refuses this node: another model" in caplog.text
    Head(config.master_port, Kind.BYE, b"")
    assert run_node(config, caplog)[0] == 0 and "node 0 has ended its engine" in caplog.text
    Head(config.master_port, Kind.BEAT, b"")
    assert run_node(config, caplog)[0] == 1 and "its engine was not started again" in caplog.text


@pytest.mark.usefixtures("as_a_program")
def test_options_that_node_0_has_otherwise_are_refused(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(node, "AGAIN_S", 0.1)
    start = msgspec.msgpack.encode(NodeStart(Mesh(pp=2), config, HERE, 1, False))
    Head(config.master_port, Kind.START, start)
    code, said = run_node(config, caplog, max_num_seqs=7)
    assert code == 1 and "max_num_seqs = 7 here, and 0 on node 0, whose options hold for all nodes" in said


@pytest.mark.usefixtures("as_a_program")
def test_a_node_without_room_for_processes_says_so_to_both(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_room(*_: object) -> None:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(node, "LocalRank", no_room)
    head = Head(config.master_port, Kind.START, msgspec.msgpack.encode(NodeStart(Mesh(pp=2), config, HERE, 1, False)))
    code, said = run_node(config, caplog)
    head.join()
    assert code == 1 and "its ranks cannot be started: " in said and "node 0 is lost" not in said
    ((kind, words),) = head.said
    assert kind is Kind.LEAVES and words.startswith(b"ends: its ranks cannot be started: ")


@pytest.mark.usefixtures("as_a_program")
def test_a_node_that_waits_to_be_heard_sees_that_node_0_is_silent(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A rank there tells more than the network holds, and the cable is cut."""

    class Rank:
        number = pid = 1

        def __init__(self, start: RankStart, status_fd: int, *_: object) -> None:
            self.status_fd, self._writing_fd = status_fd, start.status_fd
            results = RingWriter(RankMemory(start.results_fd, N_ENDS), [start.results_bell_fd], lambda: None)
            threading.Thread(target=results.put, args=(b"x" * (32 << 20),), daemon=True).start()

        def standing(self) -> Standing:
            return Standing(STEPPING, 0.1, 3, 2, 10, 0)

        def end(self) -> None:
            os.close(self.status_fd)
            os.close(self._writing_fd)

    monkeypatch.setattr(node, "LocalRank", Rank)
    monkeypatch.setattr(node, "SILENT_S", 1.0)
    monkeypatch.setattr(node, "AGAIN_S", 0.1)
    start = NodeStart(mesh_of(config), config, HERE, 1, False)
    with socket.create_server((HERE, config.master_port)) as listening:
        ended = threading.Thread(target=run_node, args=(config, caplog), daemon=True)
        ended.start()
        frames = Frames(listening.accept()[0])
    frames.greet()
    frames.send(Kind.START, msgspec.msgpack.encode(start))
    ended.join(30)
    assert not ended.is_alive() and "node 0 is lost (it said nothing for 1 s: its machine is down" in caplog.text
    frames.close()


def test_results_of_a_rank_that_tells_none_end_the_node(config: EngineConfig, port: int) -> None:
    loss = run_group(config, port, lambda frames: frames.send(Kind.RESULT, b"\0\7x"))
    assert "it tells results of rank 7, which has none to tell" in loss.message


def test_a_node_that_cannot_start_says_why(head: Nodes, port: int) -> None:
    def refuse() -> None:
        frames = come(port, hello())
        assert answer(frames)[0] is Kind.START
        frames.send(Kind.LEAVES, b"ends: dtype")
        frames.close()

    threading.Thread(target=refuse, daemon=True).start()
    with pytest.raises(RanksLost, match=r"node 1 \(other, 127.0.0.1\) ends: dtype"):
        head.start(lambda: False)


@pytest.mark.parametrize("options, message", [
    ({"nnodes": 2}, "nnodes = 2 and pipeline_parallel_size = 1: machines have whole stages.*-parallel-size 2"),
    ({"nnodes": 2, "tensor_parallel_size": 2}, "machines have whole stages of a pipeline"),
    ({"nnodes": 2, "pipeline_parallel_size": 3}, "nnodes = 2 and pipeline_parallel_size = 3"),
    ({"nnodes": 2, "pipeline_parallel_size": 2, "enable_lora": True}, "adapters are read by ranks of one machine"),
    ({"nnodes": 2, "master_addr": "0.0.0.0"}, "master_addr = '0.0.0.0' is no address at which node 0 can be reached"),
    ({"node_rank": 1}, "node_rank = 1 and nnodes = 1: nodes are numbered from 0 to 0: give --nnodes too"),
])  # fmt: skip
def test_what_cannot_lie_on_several_machines(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        mesh_of(EngineConfig(**options))


def test_a_node_that_is_none_says_so_before_it_looks_for_node_0() -> None:
    with pytest.raises(ConfigError, match="node_rank = 2 and nnodes = 2: nodes are numbered from 0 to 1"):
        node.run_node(EngineConfig(nnodes=2, node_rank=2))


def test_who_serves_and_who_does_not() -> None:
    first = EngineConfig(pipeline_parallel_size=2, nnodes=2)
    other = msgspec.structs.replace(first, node_rank=1)
    assert not _is_headless(first, ServerConfig()) and _is_headless(other, ServerConfig(headless=True))
    with pytest.raises(ConfigError, match=r"node_rank = 1 and headless = False.*add --headless"):
        _is_headless(other, ServerConfig())
    with pytest.raises(ConfigError, match=r"node_rank = 0 and headless = True.*leave --headless out"):
        _is_headless(first, ServerConfig(headless=True))


def test_meeting_points() -> None:
    assert meeting_of("/tmp/meet") is None and own_address("/tmp/meet") == "127.0.0.1"
    point = meeting_at("fd00::1", 29, "fd00::2") + "-from-0-1"
    assert meeting_of(point) == Meeting("fd00::1", 29, "fd00::2", "meet-from-0-1") and own_address(point) == "fd00::2"
