"""A worker is a rank: its life from loading to sleep, and several of them, in one process and in two."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch
import worker_rank
from worker_rank import PARAMS, make_worker, masks_of, plans, spans, values

from quire.compute.dist.comm import Reduction, SoloComm
from quire.compute.worker import Allocation, Worker
from quire.core.errors import EngineError
from quire.core.plan import PageAppend, SlotOpen, StepMasks, StepPlan

ALLOCATION = Allocation(n_pages=12, max_model_len=128)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    n_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(n_threads)


def ready(folder: pathlib.Path, **options: Any) -> Worker:
    folder.mkdir(exist_ok=True)
    worker = make_worker(folder, **options)
    worker.load()
    worker.allocate(ALLOCATION)
    return worker


def run(worker: Worker) -> list[dict[str, object]]:
    return [values(worker.run(plan, masks_of(plan))) for plan in plans()]


def assert_close(found: object, expected: object) -> None:
    """Plain values, of which numbers that are not whole may differ a little."""
    if isinstance(expected, dict) and isinstance(found, dict):
        assert found.keys() == expected.keys()
        found, expected = list(found.values()), list(expected.values())
    if isinstance(expected, list) and isinstance(found, list):
        for one, other in zip(found, expected, strict=True):
            assert_close(one, other)
    else:
        assert found == (pytest.approx(expected, abs=1e-4) if isinstance(expected, float) else expected)


def test_facts_say_what_is_held(tmp_path: pathlib.Path) -> None:
    worker = make_worker(tmp_path)
    with pytest.raises(EngineError, match="not loaded"):
        worker.allocate(ALLOCATION)
    facts = worker.load()
    assert facts.weights_bytes == worker.footprint("bfloat16", "auto").held_bytes == worker.model.n_bytes
    assert (facts.n_ranks, facts.device, facts.dtype, facts.others_bytes) == (1, "cpu", "bfloat16", 0)
    assert 0 < facts.room.free_bytes <= facts.room.total_bytes == worker.room.total_bytes
    with pytest.raises(EngineError, match="no memory for steps"):
        worker.run(plans()[0])


def test_what_plans_ask_for(tmp_path: pathlib.Path) -> None:
    first, second, third, fourth, last = run(ready(tmp_path))
    assert [len(one["tokens"]) for one in (first, second, third, fourth, last)] == [1, 2, 2, 2, 1]  # type: ignore[arg-type]
    assert list(first["prompt_logprobs"]) == ["1"] and list(third["pooled"]) == ["2"]  # type: ignore[call-overload]
    assert list(second["logprobs"]) == ["0"] and fourth["tokens"][1] in (97, 99)  # type: ignore[call-overload, index]


def test_logprobs_beside_a_row_that_failed(tmp_path: pathlib.Path) -> None:
    """A mask that leaves nothing: the other row's token is the first one, and so are its logprobs."""
    worker, prompt = ready(tmp_path), [7, 14, 21]
    plan = StepPlan(
        0, **spans((0, 0, 3, True), (1, 0, 3, True)), masked=[0],
        opened=[SlotOpen(slot, prompt, 3, PARAMS) for slot in (0, 1)],
        pages=[PageAppend(0, 0, [1]), PageAppend(1, 0, [2])],
    )  # fmt: skip
    whole = worker.run(plan, StepMasks(0, bytes([255] * 16)))
    failed = worker.run(msgspec.structs.replace(plan, step=1, closed=[0, 1]), StepMasks(1, bytes(16)))
    assert list(whole.logprobs) == [0, 1] and (failed.n_new, failed.tokens) == ([0, 1], whole.tokens[1:])
    assert [fault.slot for fault in failed.faults] == [0] and failed.logprobs == {0: whole.logprobs[1]}


def test_asleep_and_awake_again(tmp_path: pathlib.Path) -> None:
    worker = ready(tmp_path)
    before = run(worker)
    for level in (1, 2):
        worker.sleep(level)
        assert worker.is_loaded == (level == 1)
        with pytest.raises(EngineError, match="no memory for steps"):
            worker.run(plans()[0])
        worker.wake()
        assert run(worker) == before


def test_workers_of_one_process_share_nothing(tmp_path: pathlib.Path) -> None:
    """Steps of two in turns, the second one step behind, then without the first: each as if it were alone."""
    alone = run(ready(tmp_path / "alone"))
    one, other = ready(tmp_path / "one"), ready(tmp_path / "other")
    found: dict[Worker, list[object]] = {one: [], other: []}
    for plan, late in zip([*plans(), None], [None, *plans()], strict=True):
        for worker, given in ((one, plan), (other, late)):
            if given is not None:
                found[worker].append(values(worker.run(given, masks_of(given))))
        if plan is None:
            one.sleep(2)
    assert found[one] == found[other] == alone


def test_ranks_in_two_processes(tmp_path: pathlib.Path) -> None:
    """The same values make each rank; facts hold for both, and what they compute is what a rank alone does, in every
    kind of plan: chunks, logprobs, vectors, masks. (`test_rank_models.py` has the models.)"""
    whole = ready(tmp_path / "alone", dtype="float32")
    alone = run(whole)
    program, meeting_point = worker_rank.__file__, f"{tmp_path}/meet"
    ranks = [
        subprocess.Popen(
            [sys.executable, program, str(rank), "2", meeting_point, str(tmp_path)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    ended = [rank.communicate(timeout=300) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], ended
    found = [json.loads(output.splitlines()[-1]) for output, _ in ended]
    for one in found:
        assert one["agree"] and one["ranks"] == [1.0, 2.0] and one["n_ranks"] == 2
        assert_close(one["results"], json.loads(json.dumps(alone)))
    assert found[0]["weights_bytes"] == found[1]["weights_bytes"] < 0.6 * whole.model.n_bytes
    assert found[0]["free_bytes"] == found[1]["free_bytes"], "the least of both"


def test_a_rank_that_is_alone_sends_nothing() -> None:
    comm, x = SoloComm(), torch.tensor([1.0, 2.0])
    for reduction in Reduction:
        assert comm.all_reduce(x, reduction) is x and x.tolist() == [1.0, 2.0]
    assert (comm.rank, comm.size) == (0, 1)
