"""Which group a rank sums through, in which order groups are left, and what of that is done when a start fails."""

from __future__ import annotations

from typing import Any

import pytest
from calling_device import CallingDevice

from quire.compute import platform
from quire.compute.dist.nccl import NcclComm
from quire.compute.dist.peers import PeerComm
from quire.compute.platform import CudaPlatform
from quire.compute.worker import Worker
from quire.config.engine import EngineConfig
from quire.core.errors import ConfigError
from quire.engine.ranks.leader import LeadingWorker
from quire.engine.workers import Meeting, _groups


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
    with pytest.raises(ConfigError, match="= 8 needs 8 GPUs, one a rank, and 4 are visible"):
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
    worker.meeting = Meeting(Called("comm", calls), Called("pipeline", calls), worker)  # type: ignore[arg-type]
    monkeypatch.setattr(Worker, "close", lambda self: calls.append("graphs"))
    worker.close()
    assert calls == order
