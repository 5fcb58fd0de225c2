"""One of each fault of a rank, in little (`benchmarks/rank_faults.py` does it twenty times): it is seen and named,
every request ends, the engine starts again, and nothing is left."""

from __future__ import annotations

import asyncio
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest
from rank_cases import SIZE, checkpoint

from benchmarks.rank_faults import ENGINE, HANGING, INJECTION, RANK, is_there
from quire import LLM, SamplingParams
from quire.config.engine import EngineConfig
from quire.config.mesh import Mesh
from quire.core.errors import ConfigError, EngineError, EngineLost
from quire.engine import build
from quire.engine.async_llm import AsyncLLM
from quire.engine.executors.executor import RanksLost
from quire.engine.ranks import group, member
from quire.engine.ranks.ring import IDLE
from quire.engine.stream import RequestStream

FEW = SamplingParams(temperature=0, max_tokens=4)
LONG = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
SMALL = """
from quire.core import host
host.free_bytes = host.total_bytes = lambda: 1 << 10
host.swap_bytes = lambda: 0
from quire.engine.ranks.process import main
raise SystemExit(main())
"""
"""A rank beside rank 0 has hardly any memory."""
WAITING = "import sys, quire\n"
WAITING += "llm = quire.LLM(sys.argv[1], device='cpu', tensor_parallel_size=2, num_threads=1)\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return checkpoint("qwen3", tmp_path_factory.mktemp("models") / "qwen3")


@pytest.fixture
def temporary(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A folder of this test for temporary files."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", None)
    return folder


def inject(code: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Into each process that is started."""
    (tmp_path / "sitecustomize.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]))


def ranks_below(pid: int) -> list[psutil.Process]:
    return [one for one in psutil.Process(pid).children(recursive=True) if RANK in one.cmdline()]


@pytest.mark.parametrize("number, message", [
    (signal.SIGUSR2, r"rank 1 ran out of memory .MemoryError: injected, at \w+/\w+.py:\d+ in \w+.; its stack is"),
    (signal.SIGRTMIN, r"rank 1 \(process \d+\) made no progress for 0.8 s and was ended"),
], ids=["memory", "hang"])  # fmt: skip
def test_a_rank_without_memory_or_that_hangs_is_named_with_its_stack(
    number: signal.Signals, message: str, model: str, tmp_path: pathlib.Path, temporary: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    inject(INJECTION, tmp_path, monkeypatch)
    llm = LLM(model, **SIZE, tensor_parallel_size=2)
    assert llm.engine.ranks is not None
    (pid,) = llm.engine.ranks.pids
    device = llm.engine.executor._own.worker.platform.device  # type: ignore[attr-defined]
    assert device.is_watched and len(device.checks) == 1
    while llm.engine.ranks._standings()[1].state != IDLE:  # it may be behind rank 0 in its last order
        time.sleep(0.01)
    monkeypatch.setattr(group, "LOST_S", 0.8)
    os.kill(pid, number)
    with pytest.raises(EngineError, match=message):
        llm.generate(["one"], LONG, use_tqdm=False)
    llm.shutdown()
    assert not psutil.pid_exists(pid) and not list(temporary.glob("quire*"))
    assert ("fail" if number == signal.SIGUSR2 else HANGING) in capfd.readouterr().err


async def ending(stream: RequestStream) -> str:
    """How a request ends."""
    try:
        async for output in stream:
            if output.finished:
                return output.outputs[0].finish_reason or "unknown"
    except EngineLost:
        return "lost"
    return "without a word"


@pytest.mark.parametrize("divided, number", [
    ("tensor", signal.SIGKILL), ("pipeline", signal.SIGKILL), ("data", signal.SIGKILL),
])  # fmt: skip
async def test_a_lost_rank_of_a_server_costs_no_request_its_end(
    divided: str, number: signal.Signals, model: str, temporary: pathlib.Path, capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    llm = await AsyncLLM.create(EngineConfig(model=model, **SIZE, **{f"{divided}_parallel_size": 2}))
    try:
        assert llm.healthy() and llm._supervisor is not None and llm._supervisor.pid is not None
        (rank,) = ranks_below(llm._supervisor.pid)
        engine = psutil.Process(llm._supervisor.pid)
        streams = [await llm.submit(f"{number} one two three", LONG) for number in range(3)]
        rank.send_signal(number)
        ends = asyncio.gather(*map(ending, streams))
        while llm.healthy():
            await asyncio.sleep(0.01)
        assert set(await ends) <= {"length", "lost"}
        while not llm.healthy():
            await asyncio.sleep(0.05)
        assert await ending(await llm.submit("again", FEW)) in ("length", "stop")
        assert llm.n_engines_lost == 1 and not is_there(rank) and not is_there(engine)
        (next_rank,) = ranks_below(llm._supervisor.pid)
        assert len(list(temporary.glob("**/quire-ranks-*"))) == 1
    finally:
        await llm.shutdown()
    assert not is_there(next_rank) and not list(temporary.glob("quire*"))
    said = capfd.readouterr().err + caplog.text
    assert said.count(f"(process {rank.pid}) ended with SIGKILL") == 1, "the engine and its supervisor need not both"


@pytest.mark.parametrize("error", [ConfigError("no tokenizer"), KeyboardInterrupt()], ids=["error", "Ctrl-C"])
def test_a_start_that_fails_half_way_leaves_nothing(
    error: BaseException, model: str, temporary: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        found.extend(ranks_below(os.getpid()))
        raise error

    found: list[psutil.Process] = []
    monkeypatch.setattr(build, "load_tokenizer", fail)
    with pytest.raises(type(error)):
        LLM(model, **SIZE, tensor_parallel_size=2)
    assert len(found) == 1 and not is_there(found[0]) and not list(temporary.glob("quire*"))


def test_every_rank_looks_whether_its_part_fits(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member, "RANK_COMMAND", ("-c", SMALL))
    with pytest.raises(ConfigError, match=r"rank 1: .* does not fit: "):
        LLM(model, **SIZE, tensor_parallel_size=2)


@pytest.mark.parametrize("command, code, status, said", [
    (RANK, "import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 1, r"rank 1 \(process \d+\) ended with SIGKILL"),
    (RANK, SMALL.partition("from quire.engine")[0], 2, "rank 1: .* does not fit: "),
    (ENGINE, "import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 1, "the engine process ended with SIGKILL"),
], ids=["killed", "refused", "rank 0"])  # fmt: skip
def test_a_killed_rank_ends_the_start_of_a_server_as_a_fault_and_not_as_wrong_options(
    command: str, code: str, status: int, said: str, model: str, temporary: pathlib.Path, tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """With status 2 `packaging/quire.service` does not start it again."""
    lines = [f"    {line}" for line in code.strip().splitlines()]
    inject("\n".join(["import sys", f"if {command!r} in sys.orig_argv:", *lines]), tmp_path, monkeypatch)
    words = [sys.executable, "-m", "quire", "serve", model, "--device", "cpu", "-tp", "2", "--port", "0"]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=90)
    assert ended.returncode == status, ended.stderr
    assert re.search(f"^quire: error: {said}", ended.stderr, re.MULTILINE), ended.stderr
    assert not list(temporary.glob("quire*"))


DEAF = """
import sys, time, msgspec
from quire.engine.ranks.ring import READY, RankMemory
from quire.engine.ranks.start import RankStart
start = msgspec.json.decode(sys.stdin.buffer.readline(), type=RankStart)
RankMemory(start.memory_fd, start.shape.n_ranks).set_state(start.rank, READY)
time.sleep(600)
"""
"""A rank that is ready, and never comes to the meeting."""


def test_who_waits_at_the_meeting_learns_of_a_loss(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member, "RANK_COMMAND", ("-c", DEAF))
    ranks, never, abandoned = group.RankGroup(EngineConfig(), Mesh(tp=2), tmp_path), threading.Event(), []
    ranks.abandon = lambda: abandoned.append(1)
    ranks.start()
    (pid,) = ranks.pids
    ranks.beside(lambda: None)
    with pytest.raises(ZeroDivisionError):
        ranks.beside(lambda: [][1 // 0])
    threading.Timer(0.2, os.kill, (pid, signal.SIGKILL)).start()
    with pytest.raises(RanksLost, match=rf"rank 1 \(process {pid}\) ended with SIGKILL"):
        ranks.beside(lambda: never.wait() and None)
    never.set()
    ranks.stop()
    assert abandoned == [1]


def test_ctrl_c_while_ranks_start_ends_all(model: str, temporary: pathlib.Path) -> None:
    """As soon as there is a rank, whatever it does then."""
    leader = subprocess.Popen([sys.executable, "-c", WAITING, model], start_new_session=True)
    while not (ranks := ranks_below(leader.pid)):
        assert leader.poll() is None
        time.sleep(0.02)
    os.killpg(leader.pid, signal.SIGINT)
    assert leader.wait(60) == -signal.SIGINT
    end_s = time.monotonic() + 5
    while is_there(ranks[0]) and time.monotonic() < end_s:
        time.sleep(0.02)
    assert not is_there(ranks[0]) and not list(temporary.glob("quire*"))


@pytest.mark.parametrize("number, whom", [
    (signal.SIGTERM, ""), (signal.SIGKILL, ""), (signal.SIGKILL, ENGINE),
], ids=["server is told to end", "server killed", "rank 0 killed"])  # fmt: skip
def test_a_rank_that_is_stopped_before_it_can_notice_anything_does_not_outlive_a_server(
    number: signal.Signals, whom: str, model: str, temporary: pathlib.Path, tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """It has no death signal yet, and reads no end of file."""
    stop = f"if {RANK!r} in sys.orig_argv: os.kill(os.getpid(), signal.SIGSTOP)"
    inject(f"import os, signal, sys\n{stop}", tmp_path, monkeypatch)
    words = [sys.executable, "-m", "quire", "serve", model, "--device", "cpu", "-tp", "2", "--port", "0"]
    server = subprocess.Popen(words, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        end_s = time.monotonic() + 120
        while not (ranks := ranks_below(server.pid)) or ranks[0].status() != psutil.STATUS_STOPPED:
            assert server.poll() is None and time.monotonic() < end_s
            time.sleep(0.02)
        engine = psutil.Process(ranks[0].ppid())
        os.kill(engine.pid if whom else server.pid, number)
        assert server.wait(60) == (1 if whom else 0 if number == signal.SIGTERM else -number)
    finally:
        server.kill()
        server.wait()
    end_s = time.monotonic() + 10
    while (left := list(filter(is_there, [ranks[0], engine]))) and time.monotonic() < end_s:
        time.sleep(0.02)
    for one in left:
        one.kill()
    assert not left and not list(temporary.glob("quire*"))
