"""Data-parallel ranks that share nothing: workers of this process, each of which gets every plan and does its part."""

from __future__ import annotations

import pathlib
from typing import Any

import msgspec
import pytest
from calling_device import CallingDevice, LivePlans
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
