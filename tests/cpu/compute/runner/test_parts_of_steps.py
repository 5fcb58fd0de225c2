"""Data-parallel ranks that share nothing: workers of this process, each of which gets every plan and does its part."""

from __future__ import annotations

import pathlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
import worker_rank
from calling_device import CallingDevice, LivePlans
from thread_ranks import ThreadComm, ThreadGroup
from worker_rank import PARAMS, make_worker, plans, spans, values

from quire.compute import platform
from quire.compute.dist.comm import SoloComm
from quire.compute.dist.data_parallel import DataParallel
from quire.compute.platform import CudaPlatform
from quire.compute.runner import data_parallel
from quire.compute.worker import Allocation, Worker
from quire.config.mesh import Mesh
from quire.core.plan import PageAppend, SlotOpen, StepMasks, StepPlan
from quire.core.plan_parts import joined, part_of
from quire.core.result import StepResult

N_SLOTS = 4
SLOT_OF = [1, 6, 3]
"""The first and the third sequence are on rank 0, the second on rank 1."""
HALVES = Mesh(dp=2)
EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
}  # fmt: skip


def moved(plan: StepPlan) -> StepPlan:
    """The same sequences in slots of two ranks."""

    def parts(found: list[Any]) -> list[Any]:
        return [msgspec.structs.replace(one, slot=SLOT_OF[one.slot]) for one in found]

    spans = msgspec.structs.replace(plan.spans, slots=[SLOT_OF[slot] for slot in plan.spans.slots])
    closed = [SLOT_OF[slot] for slot in plan.closed]
    changes = {"spans": spans, "closed": closed, "opened": parts(plan.opened), "pages": parts(plan.pages)}
    return msgspec.structs.replace(plan, **changes)


def workers_of(folder: pathlib.Path, platform: Any = None) -> list[Worker]:
    """Memory chooses half of the slots that were asked for, as it does for recurrent states."""
    made, asked = [], 2 * N_SLOTS
    for rank in range(2):
        data = DataParallel(HALVES, rank, asked, 64, SoloComm(), lambda *_: pytest.fail("nobody is met"), "")  # type: ignore[arg-type]
        worker = make_worker(folder, dtype="float32", data=data, platform=platform)
        worker.load()
        worker.allocate(Allocation(12, 128, max_num_seqs=N_SLOTS))
        made.append(worker)
    return made


def ready(folder: pathlib.Path, platform: Any = None) -> Worker:
    worker = make_worker(folder, dtype="float32", platform=platform)
    worker.load()
    worker.allocate(Allocation(12, 128))
    return worker


def run(workers: list[Worker], plan: StepPlan) -> StepResult:
    return joined(plan, [worker.run(plan, masks_for(plan)) for worker in workers], N_SLOTS)


def masks_for(plan: StepPlan) -> StepMasks | None:
    """Another one for each masked span: two tokens may be chosen."""
    lines = [(0b101 << 8 * span).to_bytes(16, "little") for span in plan.masked]
    return StepMasks(plan.step, b"".join(lines)) if lines else None


@pytest.mark.parametrize("captures", [None, False, True])
def test_two_ranks_say_what_one_says(
    captures: bool | None, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """captures: on a device whose graphs are calls; None: on a CPU, with one native call where it can be."""
    monkeypatch.setattr(platform.cuda, "CudaDevice", CallingDevice)
    monkeypatch.setattr(platform.cuda, "n_devices", lambda: 1)
    if captures is not None:
        LivePlans(monkeypatch)
    device = None if captures is None else CudaPlatform(captures=captures)
    whole, workers = ready(tmp_path, device), workers_of(tmp_path, device)
    for plan in plans():
        plan.masked = [0, 1] if plan.masked else []
        expected = values(whole.run(plan, masks_for(plan)))
        assert values(run(workers, moved(plan))) == expected
    assert expected["tokens"] and not workers[1].run(moved(plans()[4])).tokens, "it has no rows of the last step"
    assert not workers[1].runner.tail.opened, "but its sequence is gone"


@pytest.mark.parametrize("captures", [False, True])
def test_ranks_that_send_rows_decode_together(
    captures: bool, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each holds half of the experts. Steps in which all decode are one captured step on both, filled up alike, also
    where one has fewer rows or none; steps with prompts are launched kernel by kernel."""
    monkeypatch.setattr(platform.cuda, "CudaDevice", CallingDevice)
    monkeypatch.setattr(platform.cuda, "n_devices", lambda: 1)
    for name, value in EXPERTS.items():
        monkeypatch.setitem(worker_rank.CONFIG, name, value)
    LivePlans(monkeypatch)
    whole, mesh, group = ready(tmp_path, CudaPlatform(captures=False)), Mesh(dp=2, ep=2), ThreadGroup(2)
    options = {"dtype": "float32", "data_parallel_size": 2, "enable_expert_parallel": True}

    def worker_of(rank: int) -> Worker:
        comm = ThreadComm(rank, group)
        data = DataParallel(mesh, rank, N_SLOTS, 64, comm, lambda *_: pytest.fail("nobody shares"), "")  # type: ignore[arg-type]
        folder = tmp_path / str(rank)
        folder.mkdir()
        worker = make_worker(folder, comm, data=data, platform=CudaPlatform(captures=captures), **options)
        worker.load()
        worker.allocate(Allocation(12, 128))
        return worker

    with ThreadPoolExecutor(2) as threads:
        workers = list(threads.map(worker_of, range(2)))
        for plan in plans():
            plan.masked = [0, 1] if plan.masked else []
            expected = whole.run(plan, masks_for(plan))
            for worker in workers:
                worker.platform.device.n_replays = 0  # type: ignore[attr-defined]
            parts = list(threads.map(lambda one, plan=plan: one.run(moved(plan), masks_for(plan)), workers))
            found = joined(moved(plan), parts, N_SLOTS)
            assert (found.tokens, found.n_new) == (expected.tokens, expected.n_new)
            replays = [worker.platform.device.n_replays for worker in workers]  # type: ignore[attr-defined]
            assert [one > 0 for one in replays] == [captures and plan.step >= 3] * 2, (plan.step, replays)


def test_a_step_whose_masks_are_of_another_rank_is_launched_in_its_turn(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who submits it waits for masks. The plan is cut once, all the same."""
    workers, plain = workers_of(tmp_path), msgspec.structs.replace(PARAMS, logprobs=-1)
    opened = [SlotOpen(slot, [5, 6, 7], 3, plain) for slot in (0, N_SLOTS)]
    pages = [PageAppend(slot, 0, [1]) for slot in (0, N_SLOTS)]
    first = StepPlan(0, **spans((0, 0, 3, True), (N_SLOTS, 0, 3, True)), opened=opened, pages=pages)
    assert len(run(workers, first).tokens) == 2
    plan = StepPlan(1, **spans((0, 3, 1, True), (N_SLOTS, 3, 1, True)), masked=[1])
    cut: list[int] = []
    monkeypatch.setattr(data_parallel, "part_of", lambda *given: cut.append(given[1]) or part_of(*given))
    assert [worker.prepare(plan) for worker in workers] == [None, None]
    assert all(worker.stage(plan) is None for worker in workers)
    assert len(run(workers, plan).tokens) == 2 and cut == [0, 1]
    if workers[0].runner._ahead is not None:
        free = msgspec.structs.replace(plan, masked=[])
        assert all(worker.prepare(free) is not None for worker in workers)
