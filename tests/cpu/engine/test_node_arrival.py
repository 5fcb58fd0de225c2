"""A node that comes to node 0: what it says while it waits, why it ends. Node 0 is by hand here (`node_ends.py`)."""

from __future__ import annotations

import errno
import logging
import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from node_ends import HERE, Head

from quire.cli.main import main
from quire.cli.serve import _is_headless
from quire.config.engine import EngineConfig
from quire.config.mesh import Mesh, mesh_of
from quire.core.errors import ConfigError
from quire.engine.ranks import arrival, node
from quire.engine.ranks.node_port import reserved_port
from quire.engine.ranks.node_wire import Frames, Kind, NodeStart
from quire.engine.ranks.results import N_ENDS
from quire.engine.ranks.ring import STEPPING, RankMemory, RingWriter, Standing
from quire.engine.ranks.start import RankStart


@pytest.fixture
def config() -> Iterator[EngineConfig]:
    with reserved_port() as port:
        yield EngineConfig(pipeline_parallel_size=2, nnodes=2, master_port=port.getsockname()[1])


def run_node(config: EngineConfig, caplog: pytest.LogCaptureFixture, **changes: Any) -> tuple[int, str]:
    """Its exit status, and what it says."""
    code = node.run_node(msgspec.structs.replace(config, node_rank=1, **changes))
    return code, caplog.text


@pytest.fixture
def as_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Signals and the log stay the tests'."""
    monkeypatch.setattr(node.logs, "set_up", lambda who: logging.getLogger("quire").setLevel(logging.INFO))
    monkeypatch.setattr(node.signal, "signal", lambda number, handler: None)
    monkeypatch.setattr(arrival, "TRY_S", 0.02)


@pytest.mark.usefixtures("as_a_program")
def test_a_node_that_meets_nobody_ends(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(arrival, "COME_S", 0.1)
    code, said = run_node(config, caplog)
    where = f"127.0.0.1 port {config.master_port}"
    assert code == 1 and f"looking for node 0 at {where}" in said
    assert f"waiting for node 0 at {where} (Connection refused), at most 0 s more: 127.0.0.1 is this machine" in said
    assert f"node 0 did not answer at {where} for 0.1 s (Connection refused): 127.0.0.1 is this machine itself" in said


@pytest.mark.usefixtures("as_a_program")
@pytest.mark.parametrize("address", ["no.such.host.invalid", "a" * 80 + ".com", ""])
def test_an_address_that_is_none_is_an_error_before_the_model_is_looked_for(
    address: str, config: EngineConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(node, "find_checkpoint", lambda *_: pytest.fail("first comes the address"))
    with pytest.raises(ConfigError, match=f"--master-addr '{address}' is not known here"):
        run_node(config, caplog, master_addr=address)


@pytest.mark.parametrize("code, address, advice", [
    (errno.ECONNREFUSED, "10.0.0.1", "10.0.0.1 is there, but nothing listens: is node 0 started, with this --master-"),
    (errno.ETIMEDOUT, "10.0.0.1", "is 10.0.0.1 node 0's address, is node 0 started, and does a firewall let this"),
    (errno.EHOSTUNREACH, "10.0.0.1", "is 10.0.0.1 node 0's address"),
    (errno.ECONNREFUSED, "localhost", "localhost is this machine itself; if node 0 is on another, give its address"),
])  # fmt: skip
def test_what_to_look_at_when_node_0_does_not_answer(code: int, address: str, advice: str) -> None:
    assert arrival._advice(address, OSError(code, os.strerror(code))).startswith(advice)


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
    monkeypatch.setattr(arrival, "CONNECT_S", 0.1)
    with socket.create_server(where), monkeypatch.context() as short:
        short.setattr(arrival, "COME_S", 0.2)
        code, said = run_node(config, caplog)
    assert code == 1 and f"did not answer at {HERE} port {config.master_port} for 0.2 s (it is listened on, and" in said
    assert "node 0 is still starting, or another program has its --master-port" in said

    monkeypatch.setattr(arrival, "CONNECT_S", 5.0)
    listening = socket.create_server(where)

    def come_round() -> None:
        listening.accept()[0].close()
        Head(config.master_port, Kind.BYE, b"", listening)

    threading.Thread(target=come_round, daemon=True).start()
    assert run_node(config, caplog)[0] == 0


@pytest.mark.usefixtures("as_a_program")
def test_a_node_ends_as_node_0_wishes(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(arrival, "AGAIN_S", 0.1)
    Head(config.master_port, Kind.REFUSED, b"another model")
    assert run_node(config, caplog)[0] == 1 and "node 0 refuses this node: another model" in caplog.text
    Head(config.master_port, Kind.LOST, b"rank 5 (process 7 on node 2) was killed")
    assert run_node(config, caplog)[0] == 1
    assert "the engine of node 0 is lost (rank 5 (process 7 on node 2) was killed): the ranks of this" in caplog.text
    Head(config.master_port, Kind.START, b"\x81\xa5shape\x07")
    assert run_node(config, caplog)[0] == 1
    assert f"node 0 ({HERE}) sent a start that cannot be read (Expected `object`, got `int`" in caplog.text
    Head(config.master_port, Kind.BYE, b"")
    assert run_node(config, caplog)[0] == 0 and "node 0 has ended its engine" in caplog.text
    Head(config.master_port, Kind.BEAT, b"")
    assert run_node(config, caplog)[0] == 1 and "its engine was not started again" in caplog.text


def test_a_node_says_the_options_that_must_be_those_of_node_0(config: EngineConfig) -> None:
    own: dict[str, Any] = {"model": "elsewhere", "num_threads": 3, "node_rank": 1}
    given = msgspec.structs.replace(config, max_num_seqs=7, hf_overrides={"a": [1, {"b": 2}]}, **own)
    found = arrival.given_options(given)
    assert found == arrival.given_options(config) | {"max_num_seqs": 7, "hf_overrides": {"a": [1, {"b": 2}]}}
    assert not arrival.difference(found, given)
    del found["hf_overrides"]
    said = "it has --max-num-seqs 7, and node 0 has {}, whose options hold"
    assert arrival.difference(found, config).startswith(said.format("the default"))
    other = msgspec.structs.replace(config, max_num_seqs=5)
    assert arrival.difference(found, other).startswith(said.format(5))


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
    monkeypatch.setattr(arrival, "AGAIN_S", 0.1)
    start = NodeStart(mesh_of(config), config, HERE, 1, False)
    with socket.create_server((HERE, config.master_port)) as listening:
        ended = threading.Thread(target=run_node, args=(config, caplog), daemon=True)
        ended.start()
        frames = Frames(listening.accept()[0])
    frames.greet()
    frames.send(Kind.START, msgspec.msgpack.encode(start))
    ended.join(30)
    assert not ended.is_alive() and "for 1 s: its machine or the network is down, or it is stopped" in caplog.text
    frames.close()


def test_a_node_that_is_none_says_so_before_it_looks_for_node_0() -> None:
    with pytest.raises(ConfigError, match="node_rank = 2 and nnodes = 2: nodes are numbered from 0 to 1"):
        node.run_node(EngineConfig(nnodes=2, node_rank=2))


def test_who_serves_and_who_does_not() -> None:
    first = EngineConfig(pipeline_parallel_size=2, nnodes=2)
    other = msgspec.structs.replace(first, node_rank=1)
    assert not _is_headless(first, is_asked=False) and _is_headless(other, is_asked=True)
    with pytest.raises(ConfigError, match=r"--node-rank 1 without --headless.*add --headless"):
        _is_headless(other, is_asked=False)
    with pytest.raises(ConfigError, match=r"--headless with --node-rank 0.*leave --headless out"):
        _is_headless(first, is_asked=True)


@pytest.fixture
def as_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """`quire serve` that neither serves nor holds ranks."""
    monkeypatch.setattr("quire.cli.serve.ignore_hangups_until_served", lambda: None)
    monkeypatch.setattr("quire.cli.serve.stdio.show_stacks_on_signal", lambda: None)
    monkeypatch.setattr("quire.engine.ranks.node.run_node", lambda _: 0)


HEADLESS = ["serve", "demo", "--nnodes", "2", "--node-rank", "1", "--headless"]


@pytest.mark.usefixtures("as_a_command")
def test_a_node_without_http_says_which_options_it_does_not_use(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(HEADLESS) == 0 and capsys.readouterr().err == ""
    http = ["--port", "9", "--host", "0.0.0.0", "--api-key", "secret", "--ssl-certfile", "/not/here"]
    assert main([*HEADLESS, *http]) == 0
    assert capsys.readouterr().err == (
        "quire: not used by this node, for node 0 serves HTTP: --host, --port, --api-key, --ssl-certfile\n"
    )


@pytest.mark.usefixtures("as_a_command")
@pytest.mark.parametrize("address, said", [
    ("no.such.host.invalid", "'no.such.host.invalid' is not known here"),
    ("192.0.2.1", "'192.0.2.1' cannot be listened on (Cannot assign requested address): give an address of this"),
])  # fmt: skip
def test_node_0_says_what_is_wrong_with_its_address_before_anything_is_loaded(
    address: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("quire.serve.server.run", lambda *_: pytest.fail("nothing is to be loaded"))
    assert main(["serve", "demo", "--device", "cpu", "-pp", "2", "--nnodes", "2", "--master-addr", address]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.usefixtures("as_a_command")
def test_node_0_says_that_its_port_is_taken_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("quire.serve.server.run", lambda *_: pytest.fail("nothing is to be loaded"))
    with socket.create_server((HERE, 0)) as taken:
        port = str(taken.getsockname()[1])
        options = ("-pp", "2", "--nnodes", "2", "--master-port", port)
        assert main(["serve", "demo", "--device", "cpu", *options]) == 2
    assert f"--master-port {port} of 127.0.0.1 is in use: stop what uses it" in capsys.readouterr().err


def test_a_port_that_is_kept_is_for_who_was_told_of_it() -> None:
    with reserved_port() as kept:
        port = int(kept.getsockname()[1])
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((HERE, port))
        with socket.create_server((HERE, port)):
            socket.create_connection((HERE, port)).close()
        with socket.create_server((HERE, port)):
            pass
