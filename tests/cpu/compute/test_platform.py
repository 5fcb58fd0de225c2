"""What depends on the device is one value: its strategies, what is captured, its memory; all give one answer."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from calling_device import CallingDevice, LivePlans
from worker_rank import make_worker, masks_of, plans, values

from quire.compute import platform
from quire.compute.forward.eager import EagerForward
from quire.compute.forward.fused import FusedForward
from quire.compute.forward.graphs import GraphForward
from quire.compute.platform import Captured, CpuPlatform, CudaPlatform, platform_of
from quire.compute.worker import Allocation, Worker
from quire.config.engine import EngineConfig
from quire.config.model import read_arch
from quire.config.resolve import resolve
from quire.core.errors import ConfigError
from quire.kernels import native
from quire.planner.memory import Room

GIB = 1 << 30
SHAPES = pathlib.Path(__file__).resolve().parents[3] / "quire/bench/shapes"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    n_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(n_threads)


class CudaLike(CallingDevice):
    def total_bytes(self) -> int:
        return 80 * GIB

    def free_bytes(self) -> int:
        return 60 * GIB


@pytest.fixture
def cuda_like(monkeypatch: pytest.MonkeyPatch) -> None:
    LivePlans(monkeypatch)
    monkeypatch.setattr(platform.cuda, "CudaDevice", CudaLike)
    monkeypatch.setattr("quire.compute.worker.obstacle", lambda model, pool: "it is a CPU")


def ready(worker: Worker) -> Worker:
    worker.load()
    worker.allocate(Allocation(12, 128))
    return worker


def answers(worker: Worker) -> list[dict[str, Any]]:
    return [values(worker.run(plan, masks_of(plan))) for plan in plans()]


def kinds(worker: Worker) -> list[type]:
    return [type(one) for one in worker.runner._forwards]


def test_every_platform_gives_one_answer(tmp_path: pathlib.Path, cuda_like: None) -> None:
    """In one native call, from captured graphs, kernel by kernel. (Choices of a CPU take logits of float32 only.)"""
    expected = answers(ready(make_worker(tmp_path, dtype="float32")))
    for captures, strategies in ((True, [GraphForward, EagerForward]), (False, [EagerForward])):
        worker = ready(make_worker(tmp_path, platform=CudaPlatform(captures=captures), dtype="float32"))
        assert kinds(worker) == strategies
        assert answers(worker) == expected
        worker.sleep(2)
        worker.wake()
        assert answers(worker) == expected


def test_what_one_native_call_cannot_do_goes_operation_by_operation(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = ready(make_worker(tmp_path))
    if native.library() is not None:
        assert kinds(worker) == [FusedForward, EagerForward] and worker.platform.rounds
    expected = answers(worker)
    monkeypatch.setattr(platform, "obstacle", lambda model: "a reason")
    worker = ready(make_worker(tmp_path))
    assert kinds(worker) == [EagerForward] and answers(worker) == expected
    assert worker.prepare(plans()[-1]) is None


def test_memory_of_a_device_is_shared_out(tmp_path: pathlib.Path, cuda_like: None) -> None:
    worker = make_worker(tmp_path, platform=CudaPlatform())
    facts = worker.load()
    assert worker.room == facts.room == Room(80 * GIB, 60 * GIB, is_main=False)
    assert facts.others_bytes == 20 * GIB and facts.device == "cuda"


def test_what_is_captured(cuda_like: None) -> None:
    config = EngineConfig(max_num_seqs=6, max_num_batched_tokens=100)
    arch = read_arch(SHAPES / "qwen3-0.6b")
    limits = resolve(config, arch, "cuda")
    assert CudaPlatform().captured(arch, limits) == Captured((1, 2, 4, 6), 100)
    assert CudaPlatform(captures=False).captured(arch, limits) == CpuPlatform().captured(arch, limits) == Captured()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_device_that_an_option_means() -> None:
    assert platform_of(EngineConfig(num_threads=1)).name == platform_of(EngineConfig(device="cpu", num_threads=1)).name
    with pytest.raises(ConfigError, match="no CUDA device"):
        platform_of(EngineConfig(device="cuda"))
