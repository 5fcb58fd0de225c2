"""Which group a rank sums through, in which order groups are left, and what of that is done when a start fails."""

from __future__ import annotations

import os
import pathlib
import threading
import types
from typing import Any

import pytest
import torch
from calling_device import CallingDevice
from family_cases import checkpoint_of
from gloo_ranks import on_ranks

from quire.compute import platform
from quire.compute.dist.context_groups import ContextGroups
from quire.compute.dist.gloo import GlooComm
from quire.compute.dist.nccl import NcclComm
from quire.compute.dist.peers import PeerComm
from quire.compute.platform import CudaPlatform
from quire.compute.worker import Worker
from quire.config.engine import EngineConfig
from quire.config.mesh import Mesh
from quire.config.model import read_arch
from quire.core.errors import ConfigError, EngineError
from quire.engine.ranks import rank
from quire.engine.ranks.leader import LeadingWorker
from quire.engine.ranks.ring import RankMemory, RingWriter, make_memory
from quire.engine.ranks.start import RankStart
from quire.engine.ranks.wire import Measure, Stop, encode
from quire.engine.workers import Meeting, _groups, make_worker


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> CudaPlatform:
    monkeypatch.setattr(platform.cuda, "CudaDevice", CallingDevice)
    monkeypatch.setattr(platform.cuda, "n_devices", lambda: 4)
    monkeypatch.setattr(platform.cuda, "name_of", lambda index: "a GPU")
    return CudaPlatform()


def test_the_ranks_of_a_stage_sum_through_their_own_memory(gpus: CudaPlatform) -> None:
    config = EngineConfig(tensor_parallel_size=2, pipeline_parallel_size=2)
    comm, pipeline = _groups(config, gpus, 3, "at")
    assert isinstance(comm, NcclComm) and (comm.rank, comm.size) == (3, 4)
    assert pipeline is not None and isinstance(pipeline.sharing, PeerComm)
    assert (pipeline.sharing.rank, pipeline.sharing.size, pipeline.sharing._first) == (1, 2, 2)
    assert pipeline.before is not None and isinstance(pipeline.before._comm, NcclComm)
    assert gpus.device.checks == [pipeline.sharing.check]


def test_without_stages_all_ranks_do(gpus: CudaPlatform) -> None:
    comm, pipeline = _groups(EngineConfig(tensor_parallel_size=4), gpus, 1, "at")
    assert isinstance(comm, PeerComm) and comm.size == 4 and pipeline is None
    assert _groups(EngineConfig(), gpus, 0, "") == (None, None)
    with pytest.raises(ConfigError, match="8 ranks on this machine need 8 GPUs, one a rank, and 4 are visible"):
        _groups(EngineConfig(tensor_parallel_size=8), gpus, 0, "at")


class Called:
    """Notes what is called of it."""

    def __init__(self, name: str, calls: list[str], **found: Any) -> None:
        self._name, self._calls, self._found = name, calls, found

    def __getattr__(self, method: str) -> Any:
        def call() -> Any:
            self._calls.append(f"{self._name} {method}")
            return self._found.get(method)

        return call


def test_groups_of_ranks_that_share_tokens_are_joined_ended_and_left() -> None:
    """Rank 3 of a ring of two pairs: its pair, and those of its place."""
    calls: list[str] = []
    everyone: Any = Called("all", calls)
    everyone.rank, everyone.size, everyone.n_calls = 3, 4, 0
    made: dict[str, tuple[int, int]] = {}

    def connect(rank: int, size: int, at: str) -> Any:
        made[at] = rank, size
        return Called(at, calls)

    meeting = Meeting(everyone, ContextGroups(everyone, 2, connect, "at"), None)  # type: ignore[arg-type]
    for asked in (meeting.join, meeting.abort, meeting.close):
        asked()
    assert made == {"at-heads-1": (1, 2), "at-turns-1": (1, 2)}
    names = ["all", "at-heads-1", "at-turns-1"]
    assert calls == [f"{one} {did}" for did in ("join", "abort") for one in names] + [
        f"{one} close" for one in reversed(names)
    ]


@pytest.mark.parametrize("hears, is_apart, order", [
    (True, False, ["group dismiss", "graphs", "pipeline close", "comm close", "group stop"]),
    (False, False, ["group dismiss", "group stop", "comm abort", "pipeline abort", "graphs", "pipeline close",
                    "comm close", "group stop"]),
    (True, True, ["group stop", "comm abort", "pipeline abort", "graphs", "pipeline close", "comm close",
                  "group stop"]),
])  # fmt: skip
def test_in_which_order_rank_0_leaves(
    hears: bool, is_apart: bool, order: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    worker: Any = LeadingWorker.__new__(LeadingWorker)
    worker.group, worker.is_apart = Called("group", calls, dismiss=hears), is_apart
    worker.group.beside = lambda work: work()
    worker.meeting = Meeting(Called("comm", calls), Called("pipeline", calls), worker)  # type: ignore[arg-type]
    monkeypatch.setattr(Worker, "close", lambda self: calls.append("graphs"))
    worker.close()
    assert calls == order


@pytest.mark.parametrize("is_void", [False, True])
def test_a_rank_looks_at_its_device_before_each_command_and_leaves_in_order(
    is_void: bool, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check() -> None:
        calls.append("check")
        if is_void:
            raise EngineError("rank 1 has waited in vain for rank 0")

    calls: list[str] = []
    memory_fd, bell, status = make_memory(2), os.eventfd(0), os.open(os.devnull, os.O_WRONLY)
    memory = RankMemory(memory_fd, 2)
    start = RankStart(1, Mesh(tp=2), EngineConfig(), str(tmp_path), "at", memory_fd, bell, status, is_server=True)
    writer = RingWriter(memory, [bell], lambda: None)
    for said in (Measure(), Stop()):
        writer.put(encode(said))
    worker: Any = Called("worker", calls)
    worker.platform = types.SimpleNamespace(device=types.SimpleNamespace(checks=[check], mark=lambda: lambda: True))
    made = types.SimpleNamespace(worker=worker, meeting=Called("groups", calls))
    monkeypatch.setattr(rank, "read_arch", lambda *given: None)
    monkeypatch.setattr(rank, "make_worker", lambda *given, **options: made)
    monkeypatch.setattr(rank, "fit_case", lambda config, given: given is made and calls.append("case"))
    monkeypatch.setattr(rank, "check_fit", lambda case: calls.append("fit"))
    pulse: Any = types.SimpleNamespace()
    began = ["groups join", "case", "fit", "worker load", "check"]
    if is_void:
        with pytest.raises(EngineError, match="in vain"):
            rank.run_rank(start, memory, pulse)
        assert calls == began
    else:
        rank.run_rank(start, memory, pulse)
        assert calls == [*began, "worker draft_costs", "worker close", "groups close"]
    for fd in (memory_fd, bell, status):
        os.close(fd)


def test_nccl_can_be_aborted_while_it_is_left() -> None:
    class Group:
        def shutdown(self) -> None:
            comm.abort()  # from the thread that watches

        def abort(self) -> None:
            calls.append("abort")

    calls: list[str] = []
    comm = NcclComm(0, 2, "", torch.device("cpu"))
    comm.__dict__["_group"] = Group()
    comm.close()
    comm.close()
    assert calls == ["abort"]


def test_who_holds_captured_graphs_may_abort_nccl() -> None:
    """It waits for them, and for nobody else: they go between the abort and the end."""
    are_gone, calls = threading.Event(), list[str]()

    class Group:
        def abort(self) -> None:
            calls.append("abort" if are_gone.wait(20) else "hung")

    comm = NcclComm(0, 2, "", torch.device("cpu"))
    comm.__dict__["_group"] = Group()
    comm.abort()
    comm.abort()
    assert calls == []
    are_gone.set()
    comm.close()
    assert calls == ["abort"]


@pytest.mark.parametrize("moves", [False, True])
def test_ranks_whose_experts_move_open_their_ways_when_they_meet(moves: bool, tmp_path: pathlib.Path) -> None:
    """Not in the middle of the service, when pages have the memory that NCCL takes for them."""
    checkpoint_of("qwen3_moe", tmp_path)
    config = EngineConfig(device="cpu", tensor_parallel_size=2, enable_expert_parallel=True, enable_eplb=moves)
    arch = read_arch(tmp_path)

    def work(comm: GlooComm) -> list[list[int]]:
        meeting = make_worker(config, tmp_path, arch, is_server=False, rank=comm.rank, meeting_point="unused").meeting
        assert meeting is not None
        meeting.comm, found, real = comm, [], comm.all_to_all

        def noted(x: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
            found.append([*sent, *received, len(real(x, sent, received))])
            return x

        comm.all_to_all = noted  # type: ignore[method-assign]
        meeting.join()
        return found

    assert on_ranks(2, tmp_path, work) == [[[1, 1, 1, 1, 2]] if moves else []] * 2
