"""An engine whose stages lie on two nodes, here two trees of processes that share no memory: it says what one device
says, and what is lost on the other node is named."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
from rank_cases import SIZE, answers, checkpoint

from quire import LLM, SamplingParams
from quire.core.errors import EngineError
from quire.engine.ranks import group
from quire.engine.ranks.node_port import reserved_port

COMMAND = [sys.executable, "-c", "import sys; from quire.cli.main import main; sys.exit(main())", "serve"]
FEW = SamplingParams(temperature=0, max_tokens=4)
HEAD = "127.0.0.2"
"""The other node reaches it from 127.0.0.1."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return checkpoint("gemma2", tmp_path_factory.mktemp("models") / "gemma2")


class Node:
    """`quire serve --headless`, which writes to a file."""

    def __init__(self, model: str, port: int, log: pathlib.Path, *options: str) -> None:
        self.log = log
        own = ["--nnodes", "2", "--node-rank", "1", "--master-addr", HEAD, "--master-port", str(port), "--headless"]
        with log.open("w") as file:
            self.process = psutil.Popen([*COMMAND, model, *own, *options], stdout=file, stderr=subprocess.STDOUT)

    @property
    def ranks(self) -> list[psutil.Process]:
        """Its ranks' processes."""
        return list(self.process.children())

    def end(self) -> int:
        """Its exit status, within a minute."""
        return int(self.process.wait(60))


@pytest.fixture
def port() -> Iterator[int]:
    with reserved_port() as found:
        yield int(found.getsockname()[1])


@pytest.fixture
def node(model: str, port: int, tmp_path: pathlib.Path) -> Iterator[Node]:
    made = Node(model, port, tmp_path / "node.log")
    yield made
    if not is_over(made.process):
        made.process.kill()
    made.process.wait()


def engine(model: str, port: int, **options: Any) -> LLM:
    own = {"pipeline_parallel_size": 2, "nnodes": 2, "master_addr": HEAD, "master_port": port, **options}
    return LLM(model, **SIZE, **own)


def is_over(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def until(is_so: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.02)


def test_stages_of_two_ranks_on_two_nodes_say_what_one_device_says(model: str, port: int, node: Node) -> None:
    """Prompts are cut, found in the cache, computed again; with grammars; and after sleep. The other node ends with
    the engine."""
    llm = engine(model, port, tensor_parallel_size=2, enable_sleep_mode=True)
    try:
        assert len(node.ranks) == 2 and llm.engine.ranks is not None
        assert [one.pid for one in node.ranks] == llm.engine.ranks.pids[1:]
        found = answers(llm)
        stats = llm.stats()
        assert stats.preemptions > 0 and stats.prefix_hits > 0
        llm.sleep(2)
        llm.wake_up()
        assert answers(llm) == found
        one = LLM(model, **SIZE)
        try:
            assert answers(one) == found
        finally:
            one.shutdown()
    finally:
        llm.shutdown()
    assert node.end() == 0 and "node 0 has ended its engine" in node.log.read_text()
    assert "ERROR" not in node.log.read_text()


def test_what_is_lost_on_the_other_node_is_named_and_it_comes_again(
    model: str, port: int, node: Node, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    llm = engine(model, port)
    expected = llm.generate(["one"], FEW, use_tqdm=False)[0].outputs[0].token_ids
    (rank,) = node.ranks
    rank.kill()
    with pytest.raises(EngineError, match=rf"rank 1 \(process {rank.pid} on node 1\) ended with SIGKILL"):
        llm.generate(["one"], FEW, use_tqdm=False)
    llm.shutdown()
    killed = f"rank 1 (process {rank.pid} on node 1) ended with SIGKILL"
    until(lambda: "the engine of node 0 is lost" in node.log.read_text())
    said = node.log.read_text()
    assert f"node 1: {killed}" in said and f"the engine of node 0 is lost ({killed}" in said

    llm = engine(model, port)  # the node is there again by itself
    assert llm.generate(["one"], FEW, use_tqdm=False)[0].outputs[0].token_ids == expected
    monkeypatch.setattr(group, "LOST_S", 0.8)
    (rank,) = node.ranks
    rank.send_signal(signal.SIGSTOP)
    with pytest.raises(
        EngineError, match=rf"rank 1 \(process {rank.pid} on node 1 \(.*\)\) made no progress for 0.8 s"
    ):
        llm.generate(["one"], FEW, use_tqdm=False)
    assert llm.engine.ranks is not None
    llm.engine.ranks.wait_ended()
    said = capfd.readouterr().err
    assert "stopped by a signal" in said and "in run_rank" in said, "its stack came over the network"
    llm.shutdown()

    monkeypatch.undo()
    llm = engine(model, port)
    (rank,) = node.ranks
    node.process.kill()
    with pytest.raises(EngineError, match=r"node 1 \(.*, 127.0.0.1\) is lost"):
        llm.generate(["one"], FEW, use_tqdm=False)
    llm.shutdown()
    until(lambda: is_over(rank))  # no rank outlives its node


def test_a_second_node_of_the_same_number_ends_at_once_and_harms_nobody(
    model: str, port: int, node: Node, tmp_path: pathlib.Path
) -> None:
    llm = engine(model, port)
    second = Node(model, port, tmp_path / "second.log")
    assert second.end() == 1
    assert "node 0 refuses this node: --node-rank 1 is taken by node 1 (" in second.log.read_text()
    assert len(llm.generate(["one"], FEW, use_tqdm=False)[0].outputs[0].token_ids) == 4
    llm.shutdown()
    assert node.end() == 0


def test_a_node_whose_engine_is_gone_ends_its_ranks_and_then_itself(
    model: str, port: int, node: Node, tmp_path: pathlib.Path
) -> None:
    code = (
        "import sys, time, quire\n"
        f"llm = quire.LLM(sys.argv[1], device='cpu', pipeline_parallel_size=2, nnodes=2, num_threads=1,"
        f" master_addr='{HEAD}', master_port={port})\nprint('up', flush=True)\ntime.sleep(600)"
    )
    head = subprocess.Popen([sys.executable, "-c", code, model], stdout=subprocess.PIPE, text=True)
    assert head.stdout is not None and head.stdout.readline() == "up\n"
    (rank,) = node.ranks
    os.kill(head.pid, signal.SIGKILL)
    head.wait()
    until(lambda: "waiting 60 s for the next engine" in node.log.read_text())
    assert is_over(rank)
    node.process.send_signal(signal.SIGINT)
    assert node.end() == 0 and "this node ends: it was told to (SIGINT)" in node.log.read_text()
