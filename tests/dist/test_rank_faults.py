"""What ranks cannot do is refused before one is started; a rank that is lost is named, and none outlives rank 0."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable
from typing import Any

import psutil
import pytest
from rank_cases import NGRAM, SIZE, answers, checkpoint

from quire import LLM, SamplingParams
from quire.compute.worker import Worker
from quire.config.engine import EngineConfig
from quire.config.mesh import Mesh
from quire.core import host
from quire.core.errors import ConfigError, EngineError
from quire.core.plan import StepMasks, StepPlan
from quire.core.result import StepResult
from quire.engine.executors.executor import RanksLost
from quire.engine.executors.ranks import RanksExecutor
from quire.engine.ranks import group, member
from quire.engine.ranks.leader import LeadingWorker
from quire.engine.ranks.ring import RING_BYTES
from quire.engine.sleep import AsleepExecutor

FEW = SamplingParams(temperature=0, max_tokens=4)
ALONE = "import sys, time, quire\nllm = quire.LLM(sys.argv[1], device='cpu', tensor_parallel_size=2, num_threads=1)\n"
ALONE += "print(*llm.engine.ranks.pids, flush=True)\ntime.sleep(600)"

DEAF = """
import sys, time, msgspec
from quire.engine.ranks.ring import READY, RankMemory
from quire.engine.ranks.start import RankStart
start = msgspec.json.decode(sys.stdin.buffer.readline(), type=RankStart)
RankMemory(start.memory_fd, start.shape.n_ranks).set_state(start.rank, READY)
time.sleep(600)
"""
"""A rank that reads nothing from the ring."""
TORN = """
import os
from quire.core.events import EndKind
from quire.engine.ranks.start import RankFailed
if start.rank != int(sys.argv[1]):
    os.write(start.status_fd, msgspec.json.encode(RankFailed("connection closed by peer", EndKind.CRASH)))
"""
"""One whose neighbour, of the given rank, is gone."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return checkpoint("qwen3", tmp_path_factory.mktemp("models") / "qwen3")


def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("options, message", [
    ({"tensor_parallel_size": 3}, "^tensor_parallel_size = 3: attention has 4 query heads.*which 3 ranks cannot share"),
    ({"tensor_parallel_size": 0}, "tensor_parallel_size = 0 is not allowed: it must be an integer between 1 and 64"),
    ({"tensor_parallel_size": 2, "deterministic": True}, "with tensor_parallel_size = 2: the order in"),
    ({"tensor_parallel_size": 2, "device": "null"}, "device = 'null', which has no model that could be divided"),
    ({"data_parallel_size": 2, "device": "null"}, "data_parallel_size = 2 and device = 'null'"),
    ({"data_parallel_size": 2, "pipeline_parallel_size": 2}, "data-parallel ranks have no stages yet: leave one"),
    ({"data_parallel_size": 2, "speculative_config": NGRAM}, "data-parallel ranks do not draft yet: leave"),
    ({"data_parallel_size": 2, "enable_expert_parallel": True}, "no experts: leave enable_expert_parallel=True out"),
])  # fmt: skip
def test_what_ranks_cannot_do(
    model: str, options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(group.RankGroup, "start", lambda self: pytest.fail("a process was to be started"))
    monkeypatch.setattr(host, "n_cores", lambda: 1)
    with pytest.raises(ConfigError, match=message):
        LLM(model, **{**SIZE, **options})
    assert "cores" not in caplog.text, "what is refused is no matter of speed"


def test_a_rank_that_cannot_load_says_why(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member, "RANK_COMMAND", ("-c", "raise SystemExit(3)"))
    with pytest.raises(EngineError, match=r"rank 1 \(process \d+\) ended with exit status 3"):
        LLM(model, **SIZE, tensor_parallel_size=2)


def test_ranks_sleep_and_a_killed_one_is_named(model: str) -> None:
    llm = LLM(model, **SIZE, tensor_parallel_size=2, enable_sleep_mode=True)
    expected = answers(llm)
    for level in (1, 2):
        llm.sleep(level)
        llm.wake_up()
    assert answers(llm) == expected
    assert llm.engine.ranks is not None and not llm.engine.stats().is_late
    (pid,) = llm.engine.ranks.pids
    os.kill(pid, signal.SIGKILL)
    for _ in range(2):
        with pytest.raises(EngineError, match=rf"rank 1 \(process {pid}\) ended with SIGKILL"):
            llm.generate(["one"], FEW, use_tqdm=False)
    llm.shutdown()
    assert is_gone(pid)


def test_a_stopped_rank_is_late_and_then_lost(
    model: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(group, "LATE_S", 0.6)
    llm = LLM(model, **SIZE, tensor_parallel_size=2, speculative_config=NGRAM)
    assert llm.engine.ranks is not None
    (pid,) = llm.engine.ranks.pids
    os.kill(pid, signal.SIGSTOP)
    end_s = time.monotonic() + 5
    while not llm.engine.stats().is_late and time.monotonic() < end_s:
        time.sleep(0.05)
    assert llm.engine.stats().is_late and not is_gone(pid)
    told: list[bool] = []
    llm.engine.ranks.on_late = lambda: told.append(llm.engine.stats().is_late)  # type: ignore[attr-defined]
    for check in llm.engine.executor._own.worker.platform.device.checks:  # type: ignore[attr-defined]
        check()  # as a GPU that is waited for has it called: the engine's loop stands still meanwhile
    assert told == [True]
    monkeypatch.setattr(group, "LOST_S", 0.8)
    with pytest.raises(EngineError, match=r"rank 1 \(process \d+\), stopped by a signal, made no progress"):
        llm.generate(["one"], FEW, use_tqdm=False)
    llm.shutdown()
    assert is_gone(pid)
    assert "in run_rank" in capfd.readouterr().err, "its stack"


def test_no_rank_outlives_rank_0(model: str) -> None:
    """Not even one that is stopped and hears of nothing."""
    leader = subprocess.Popen([sys.executable, "-c", ALONE, model], stdout=subprocess.PIPE, text=True)
    assert leader.stdout is not None
    pid = int(leader.stdout.readline())
    os.kill(pid, signal.SIGSTOP)
    leader.kill()
    leader.wait()
    end_s = time.monotonic() + 5
    while not is_gone(pid) and time.monotonic() < end_s:
        time.sleep(0.02)
    assert is_gone(pid)


def started(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> group.RankGroup:
    """Two ranks, of which one is deaf."""
    monkeypatch.setattr(member, "RANK_COMMAND", ("-c", DEAF))
    monkeypatch.setattr(group, "LEAVE_S", 0.3)
    ranks = group.RankGroup(EngineConfig(), Mesh(tp=2), folder)
    ranks.start()
    return ranks


def begin(work: Callable[[], object]) -> tuple[threading.Thread, list[RanksLost]]:
    """In a thread that no test waits for when it hangs, and what it has raised."""
    raised: list[RanksLost] = []

    def run() -> None:
        try:
            work()
        except RanksLost as loss:
            raised.append(loss)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, raised


@pytest.mark.parametrize("is_killed", [True, False])
def test_a_full_ring_holds_up_neither_a_loss_nor_the_end(
    is_killed: bool, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = started(tmp_path, monkeypatch)
    (pid,) = ranks.pids
    writing, raised = begin(lambda: ranks.say(StepMasks(0, memoryview(bytes(RING_BYTES)))))
    writing.join(0.1)
    assert writing.is_alive(), "the ring is full"
    if is_killed:
        os.kill(pid, signal.SIGKILL)
        writing.join(1)
        assert not writing.is_alive() and "SIGKILL" in raised[0].message
    stopping, _ = begin(ranks.stop)
    for thread in (stopping, writing):
        thread.join(3)
        assert not thread.is_alive()
    assert is_gone(pid) and raised


@pytest.mark.parametrize("order, given", [("allocate", (None,)), ("draft_costs", ()), ("sleep", (1,)), ("wake", ())])
def test_a_rank_lost_in_an_order_is_named(
    order: str, given: tuple[object, ...], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 sees no more than a closed connection."""
    worker = LeadingWorker.__new__(LeadingWorker)
    worker.group = started(tmp_path, monkeypatch)
    (pid,) = worker.group.pids

    def fail(*_: object) -> None:
        os.kill(pid, signal.SIGKILL)
        raise RuntimeError("connection closed by peer")

    monkeypatch.setattr(Worker, order, fail)
    with pytest.raises(RanksLost, match=rf"rank 1 \(process {pid}\) ended with SIGKILL"):
        getattr(worker, order)(*given)
    worker.group.stop()


@pytest.mark.parametrize("killed", [1, 2])
def test_a_killed_rank_is_named_though_another_is_seen_before(
    killed: int, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group, "ROOT_S", 5.0)
    monkeypatch.setattr(member, "RANK_COMMAND", ("-c", DEAF.replace("time.sleep", f"{TORN}\ntime.sleep"), str(killed)))
    ranks = group.RankGroup(EngineConfig(), Mesh(tp=3), tmp_path)
    ranks.start()
    pid = ranks.pids[killed - 1]
    assert not ranks._lost.wait(0.3), "the other one's words are no reason yet"
    os.kill(pid, signal.SIGKILL)
    assert ranks._lost.wait(5) and ranks.loss is not None
    assert ranks.loss.message.startswith(f"rank {killed} (process {pid}) ended with SIGKILL")
    ranks.stop()


def test_a_rank_that_failed_is_named_if_no_other_is_gone(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group, "ROOT_S", 0.1)
    monkeypatch.setattr(member, "RANK_COMMAND", ("-c", DEAF.replace("time.sleep", f"{TORN}\ntime.sleep"), "1"))
    ranks = group.RankGroup(EngineConfig(), Mesh(tp=3), tmp_path)
    with contextlib.suppress(RanksLost):  # the other one may start more slowly than this one fails
        ranks.start()
    assert ranks._lost.wait(5) and ranks.loss is not None and ranks.loss.message == "connection closed by peer"
    ranks.stop()


def test_which_kernels_run_is_said_by_rank_0_alone_unless_they_are_slow_or_cannot_be_built(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    life = """
import time
from quire.engine.ranks.process import main
from quire.engine.ranks.ring import READY
from quire.kernels import catalog, jit, native, selector
def run(start, memory, pulse):
    native.logger.warning("no libraries")
    selector.missed("norm", "hopper", "no nvcc", "triton")
    selector.missed("norm", "hopper", "odd sizes", "reference")
    jit.logger.warning("no build")
    memory.set_state(start.rank, READY)
    time.sleep(600)
main(run)
"""
    monkeypatch.setattr(member, "RANK_COMMAND", ("-c", life))
    ranks = group.RankGroup(EngineConfig(), Mesh(tp=2), tmp_path)
    ranks.start()
    ranks.stop()
    said = capfd.readouterr().err
    assert "(odd sizes)" in said and "no build" in said and "no nvcc" not in said and "no libraries" not in said


def test_masks_for_lost_ranks_free_rank_0_and_its_step_says_why(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Own(AsleepExecutor):
        masked: list[StepMasks] = []

        def submit(self, plan: StepPlan) -> concurrent.futures.Future[StepResult]:
            return concurrent.futures.Future()

        def mask(self, masks: StepMasks) -> None:
            self.masked.append(masks)

    ranks = started(tmp_path, monkeypatch)
    executor, masks = RanksExecutor(Own(), ranks), StepMasks(0, memoryview(b""))
    future = executor.submit(StepPlan(0, []))
    os.kill(ranks.pids[0], signal.SIGKILL)
    assert ranks._lost.wait(5)
    executor.mask(masks)
    assert Own.masked == [masks]
    with pytest.raises(RanksLost, match="SIGKILL"):
        future.result(0)
    ranks.stop()


@pytest.mark.parametrize("is_deaf", [True, False])
def test_a_group_that_cannot_be_left_holds_nobody_up(
    is_deaf: bool, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither where another rank does not come along, nor where all others have left."""
    monkeypatch.setattr(group, "HANG_S", 0.4)
    aborted = threading.Event()

    def hang() -> None:  # as a shutdown in a library, which nothing ends
        aborted.wait(20)
        time.sleep(20)

    worker = LeadingWorker.__new__(LeadingWorker)
    worker.group = started(tmp_path, monkeypatch)
    (pid,) = worker.group.pids
    worker.group.abandon = aborted.set
    worker.meeting = types.SimpleNamespace(close=hang)  # type: ignore[assignment]
    monkeypatch.setattr(Worker, "close", lambda self: is_deaf or os.kill(pid, signal.SIGKILL))
    closing, _ = begin(worker.close)
    closing.join(10)
    assert not closing.is_alive() and is_gone(pid) and aborted.wait(10)
    assert worker.group.loss is not None
    who = f"rank 1 (process {pid})" if is_deaf else "rank 0"
    assert worker.group.loss.message == f"{who} did not leave the groups of ranks in 0.4 s"
    assert worker.group.loss.message in caplog.text


def test_what_fails_while_ranks_are_ended_has_a_reason(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "REASON_S", 0.0)
    ranks = group.RankGroup(EngineConfig(), Mesh(tp=2), tmp_path)
    ranks.stop()
    assert ranks.cause(ValueError("late")).message == "rank 0 failed (ValueError: late)"
