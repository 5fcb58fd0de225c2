"""How nodes meet: who is refused, and why; what is said when one is silent or nobody comes. The other end is written by
hand here (`node_ends.py`); other nodes are in test_node_arrival.py, engines in tests/dist/test_node_engines.py."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from node_ends import DEMO, HERE, answer, come, hello

from quire.config.engine import EngineConfig
from quire.config.mesh import Mesh, mesh_of
from quire.core.errors import ConfigError, EngineError, LoadError
from quire.core.events import EndKind
from quire.core.meeting import Meeting, meeting_at, meeting_of, own_address
from quire.engine.executors.executor import RanksLost
from quire.engine.ranks import group, node_port, nodes
from quire.engine.ranks.node_port import reserved_port
from quire.engine.ranks.node_wire import (
    MAGIC,
    Frames,
    Kind,
    NodeStart,
    RankEnded,
    Started,
    encode_standings,
    versions,
)
from quire.engine.ranks.nodes import Nodes
from quire.engine.ranks.process import failure
from quire.engine.ranks.ring import STEPPING, Standing
from quire.engine.ranks.start import RankStart


@pytest.fixture
def port() -> Iterator[int]:
    with reserved_port() as found:
        yield int(found.getsockname()[1])


@pytest.fixture
def config(port: int) -> EngineConfig:
    return EngineConfig(pipeline_parallel_size=2, nnodes=2, master_port=port)


@pytest.fixture
def head(config: EngineConfig) -> Iterator[Nodes]:
    made = Nodes(config, Mesh(pp=2), DEMO, is_server=False)
    yield made
    made.close()


def n_fds() -> int:
    """Open in this process, and not left to the collector."""
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def until(is_so: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 10
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.02)


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
    ({"options": {"max_num_seqs": 7}}, "it has --max-num-seqs 7, and node 0 has the default, whose .*: give it"),
    ({"options": {"no_such": 1}}, "it has --no-such 1, and node 0 has the default"),
    ({"model": "another"}, "its model is another one than .*demo of node 0: give both the same files"),
])  # fmt: skip
def test_a_node_that_is_not_alike_is_refused_and_told_why(
    changes: dict[str, Any], message: str, head: Nodes, port: int, caplog: pytest.LogCaptureFixture
) -> None:
    started(head)
    kind, body = answer(come(port, hello(**changes)))
    assert kind is Kind.REFUSED and re.match(message, body.decode())
    right = come(port, hello(options={"pipeline_parallel_size": 2}))
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
    assert "a frame of kind 6 with 1048576 bytes (at most 65536) is none of Quire's" in caplog.text


def test_a_second_node_of_a_number_is_refused(port: int) -> None:
    head = Nodes(EngineConfig(pipeline_parallel_size=3, nnodes=3, master_port=port), Mesh(pp=3), DEMO, is_server=False)
    started(head)
    first = come(port, hello(n_nodes=3))
    assert first.receive(10)[0] is Kind.BEAT, "it is in before the next one comes"
    kind, body = answer(come(port, hello(n_nodes=3)))
    assert kind is Kind.REFUSED and body == (
        b"--node-rank 1 is taken by node 1 (other, 127.0.0.1): give this one another, up to 2, or end that one first"
    )
    third = come(port, hello(n_nodes=3, node=2))
    assert answer(first)[0] is Kind.START
    first.send(Kind.STARTED, msgspec.msgpack.encode(Started({1: 11})))
    assert answer(third)[0] is Kind.START
    kind, body = answer(come(port, hello(n_nodes=3, node=2)))
    assert kind is Kind.REFUSED and b"--node-rank 2 is taken by node 2" in body, "also when all have come"
    head.close()


def test_who_comes_while_the_engine_runs_is_told_that_it_is_one_too_many(
    head: Nodes, port: int, caplog: pytest.LogCaptureFixture
) -> None:
    start = started(head)
    first = come(port, hello())
    assert answer(first)[0] is Kind.START
    first.send(Kind.STARTED, msgspec.msgpack.encode(Started({1: 11})))
    start.join(10)
    kind, body = answer(come(port, hello()))
    assert kind is Kind.REFUSED and body == (
        b"--node-rank 1 is taken by node 1 (other, 127.0.0.1): of --nnodes 2 it is the only other one:"
        b" end that one first"
    )
    caplog.clear()
    with socket.create_connection((HERE, port)) as scanner:
        scanner.sendall(b"GET / HTTP/1.1\r\n\r\n")
        scanner.recv(100)
    first.close()
    until(lambda: head._nodes[1].is_lost)
    with pytest.raises(OSError, match="closed"):
        answer(come(port, hello()))  # it tries again, and comes to the next engine
    assert "GET" not in caplog.text and "is refused: no more nodes are waited for by this engine" in caplog.text
    head.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((HERE, port))


def test_a_node_that_goes_before_the_others_come_may_come_again(port: int, caplog: pytest.LogCaptureFixture) -> None:
    head = Nodes(EngineConfig(pipeline_parallel_size=3, nnodes=3, master_port=port), Mesh(pp=3), DEMO, is_server=False)
    started(head)
    come(port, hello(n_nodes=3)).close()
    until(lambda: "has gone again before the others came" in caplog.text)
    again, third = come(port, hello(n_nodes=3)), come(port, hello(n_nodes=3, node=2))
    assert answer(again)[0] is Kind.START
    again.send(Kind.STARTED, msgspec.msgpack.encode(Started({1: 11})))
    assert answer(third)[0] is Kind.START
    head.close()


def test_nobody_comes(
    head: Nodes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, port: int
) -> None:
    monkeypatch.setattr(nodes, "COME_S", 0.2)
    with pytest.raises(RanksLost, match=rf"node 1 did not come to 127.0.0.1 port {port} in 0.2 s"):
        head.start(lambda: False)
    assert f"waiting at {HERE} port {port} for node 1, at most 0 s more; start it there: quire serve" in caplog.text
    assert f"node 0 waits at {HERE} port {port}, which only this machine reaches: for nodes on other" in caplog.text


def test_an_address_that_others_reach_is_not_warned_of(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(nodes, "COME_S", 0.2)
    config.master_addr = node_port.likely_address()
    if not config.master_addr:
        pytest.skip("this machine has no network")
    head = Nodes(config, Mesh(pp=2), DEMO, is_server=False)
    with pytest.raises(RanksLost):
        head.start(lambda: False)
    assert f"waiting at {config.master_addr} port" in caplog.text and "only this machine" not in caplog.text
    head.close()


def run_group(config: EngineConfig, port: int, act: Callable[[Frames], None]) -> RanksLost:
    """How a group of ranks is lost of which the other node does this, after its rank is at a step. The node is told
    why."""
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
    with contextlib.suppress(OSError):  # it is closed here, or what it has sent was not read to the end
        assert answer(frames) == (Kind.LOST, ranks.loss.message.encode())
    frames.close()
    ranks.stop()
    return ranks.loss


@pytest.mark.parametrize("has_served, told", [
    (False, (Kind.LOST, b"it has ended before it served; its own log says why")),
    (True, (Kind.BYE, b"")),
])  # fmt: skip
def test_a_node_is_told_how_an_engine_ends_that_lost_nobody(
    has_served: bool, told: tuple[Kind, bytes], config: EngineConfig, port: int
) -> None:
    ranks = group.RankGroup(config, mesh_of(config), DEMO)
    threading.Thread(target=ranks._live, daemon=True).start()
    frames = come(port, hello())
    assert answer(frames)[0] is Kind.START
    frames.send(Kind.STARTED, msgspec.msgpack.encode(Started({1: 4711})))
    until(lambda: ranks.pids == [4711])
    ranks.has_served = has_served
    ranks.stop()
    assert answer(frames) == told
    frames.close()


def test_a_node_that_says_nothing_is_named(config: EngineConfig, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "LOST_S", 0.6)
    monkeypatch.setattr(group, "LATE_S", 0.2)
    loss = run_group(config, port, lambda frames: None)
    why = "its machine or the network is down, or its process stopped"
    assert loss.message == f"node 1 (other, 127.0.0.1) said nothing for 0.6 s: {why}"
    assert loss.kind is EndKind.KILLED, "no request did that"


def test_a_rank_elsewhere_ends_in_its_own_words(
    config: EngineConfig, port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = RankEnded(1, "rank 1 ran out of memory (why)", EndKind.KILLED, "Traceback\n\x1b[31mit")
    loss = run_group(config, port, lambda frames: frames.send(Kind.ENDED, msgspec.msgpack.encode(ended)))
    assert (loss.message, loss.kind) == ("rank 1 ran out of memory (why)", EndKind.KILLED)
    assert "  Traceback\n  \\x1b[31mit\n" in capsys.readouterr().err


def test_a_rank_that_fails_says_on_which_node(config: EngineConfig) -> None:
    other = msgspec.structs.replace(config, node_rank=1)
    start = RankStart(1, mesh_of(config), other, "", "", -1, -1, -1, True)
    assert failure(start, ValueError("why")).message.startswith("rank 1 on node 1 failed (ValueError: why)")
    assert failure(start, ConfigError("why")).message == "rank 1 on node 1: why"
    start.config = EngineConfig(pipeline_parallel_size=2)
    assert failure(start, ConfigError("why")).message == "rank 1: why", "there is but one"
    kinds = [failure(start, error).kind for error in (ConfigError("why"), LoadError("why"), EngineError("why"))]
    assert kinds == [EndKind.REFUSED, EndKind.REFUSED, EndKind.CRASH]


def test_a_node_that_leaves_says_why(config: EngineConfig, port: int) -> None:
    def leave(frames: Frames) -> None:
        frames.send(Kind.LEAVES, b"ends: it was told to (SIGINT)")
        frames.close()

    assert run_group(config, port, leave).message == "node 1 (other, 127.0.0.1) ends: it was told to (SIGINT)"
    assert "is lost (the connection was closed): start it there again" in run_group(config, port, Frames.close).message


def test_of_two_ranks_the_one_that_was_killed_is_named(port: int) -> None:
    """The other one fails because of it, and its node says that first."""
    config = EngineConfig(pipeline_parallel_size=4, nnodes=2, master_port=port)
    head, kept = Nodes(config, mesh_of(config), DEMO, is_server=False), list[Frames]()

    def act() -> None:
        kept.append(frames := come(port, hello()))
        assert answer(frames)[0] is Kind.START
        frames.send(Kind.STARTED, msgspec.msgpack.encode(Started({2: 11, 3: 12})))
        for ended in (
            RankEnded(2, "rank 2 failed", EndKind.CRASH, may_be_another=True),
            RankEnded(3, "rank 3 ended with SIGSEGV", EndKind.CRASH),
        ):
            frames.send(Kind.ENDED, msgspec.msgpack.encode(ended))

    threading.Thread(target=act, daemon=True).start()
    ranks, poll = head.start(lambda: False), select.poll()
    for rank in ranks:
        poll.register(rank.status_fd, select.POLLIN)
    assert group._root(ranks, poll, poll.poll(5000)).message == "rank 3 ended with SIGSEGV"
    head.close()


@pytest.mark.parametrize("pids", [{}, {2: 11}, {1: 11, 2: 12}])
def test_a_node_that_starts_others_than_it_was_asked_for_is_lost(pids: dict[int, int], head: Nodes, port: int) -> None:
    kept: list[Frames] = []

    def answer_wrongly() -> None:
        kept.append(frames := come(port, hello()))
        assert answer(frames)[0] is Kind.START
        frames.send(Kind.STARTED, msgspec.msgpack.encode(Started(pids)))

    threading.Thread(target=answer_wrongly, daemon=True).start()
    with pytest.raises(RanksLost, match=r"node 1 .* is lost \(it says that it has started ranks \["):
        head.start(lambda: False)


def test_nothing_stays_open_of_nodes_that_are_lost(config: EngineConfig, port: int) -> None:
    """Whether their ranks were running, or another node did not come that far."""

    def lose_while_starting() -> None:
        own = EngineConfig(pipeline_parallel_size=3, nnodes=3, master_port=port)
        head = Nodes(own, Mesh(pp=3), DEMO, is_server=False)

        def act() -> None:
            one, other = come(port, hello(n_nodes=3)), come(port, hello(n_nodes=3, node=2))
            assert answer(one)[0] is Kind.START
            one.send(Kind.STARTED, msgspec.msgpack.encode(Started({1: 11})))
            assert answer(other)[0] is Kind.START
            other.close()

        threading.Thread(target=act, daemon=True).start()
        with pytest.raises(RanksLost, match="node 2"):
            head.start(lambda: False)
        head.close()

    run_group(config, port, Frames.close)
    lose_while_starting()
    before = n_fds()
    for _ in range(5):
        run_group(config, port, Frames.close)
        lose_while_starting()
    until(lambda: n_fds() <= before)


@pytest.mark.parametrize("address, message", [
    ("no.such.host.invalid", "master_addr = 'no.such.host.invalid' is not known here"),
    ("192.0.2.1", "master_addr = '192.0.2.1' cannot be listened on .*: give an address of this"),
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
    with pytest.raises(ConfigError, match=rf"master_port = {port} of 127.0.0.1 is in use: stop what uses it, or"):
        Nodes(config, Mesh(pp=2), DEMO, is_server=False)


def test_results_of_a_rank_that_tells_none_end_the_node(config: EngineConfig, port: int) -> None:
    loss = run_group(config, port, lambda frames: frames.send(Kind.RESULT, b"\0\7x"))
    assert "it tells results of rank 7, which has none to tell" in loss.message


def test_a_node_is_told_why_also_when_it_has_sent_a_result_since(head: Nodes, port: int) -> None:
    class Gone:
        def put(self, data: bytes) -> None:
            raise RanksLost("rank 1 was killed", EndKind.KILLED)

    head.results[1] = Gone()  # type: ignore[assignment]
    start = started(head)
    frames = come(port, hello())
    assert answer(frames)[0] is Kind.START
    frames.send(Kind.STARTED, msgspec.msgpack.encode(Started({1: 11})))
    start.join(10)
    frames.send(Kind.RESULT, b"\0\1x")
    frames.send(Kind.STANDINGS, encode_standings({1: Standing(STEPPING, 0.1, 3, 2, 10, 0)}))
    until(lambda: head._nodes[1].standing(1).state == STEPPING)
    head.tell_loss("rank 1 was killed")
    head.close()
    assert answer(frames) == (Kind.LOST, b"rank 1 was killed")
    frames.close()


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


def test_meeting_points() -> None:
    assert meeting_of("/tmp/meet") is None and own_address("/tmp/meet") == "127.0.0.1"
    point = meeting_at("fd00::1", 29, "fd00::2") + "-from-0-1"
    assert meeting_of(point) == Meeting("fd00::1", 29, "fd00::2", "meet-from-0-1") and own_address(point) == "fd00::2"
