"""Drafts on a real model, several steps deep: whatever the device keeps, the tokens are those of plain decoding."""

from __future__ import annotations

import pathlib
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from calling_device import CallingDevice, LivePlans
from worker_rank import CONFIG, PARAMS, make_worker, spans

from quire.compute import platform
from quire.compute.draft.drafter import Drafter, EachSequence
from quire.compute.draft.ngram import NgramDrafter
from quire.compute.platform import CudaPlatform
from quire.compute.runner.tables import SlotTables
from quire.compute.worker import Allocation
from quire.control.config import SchedulerConfig
from quire.control.scheduler import Scheduler
from quire.core.clock import MonotonicClock
from quire.core.commands import Submit
from quire.core.events import FinishReason
from quire.core.plan import PageAppend, SlotOpen, Spans, StepPlan
from quire.core.request import Request
from quire.core.sampling import SamplingParams
from quire.engine.core import EngineCore
from quire.engine.executors.inline import LaunchExecutor, ThreadExecutor

N_REQUESTS, MAX_TOKENS = 7, 40
VOCAB = CONFIG["vocab_size"]


class KnowingDrafter:
    """Knows what plain decoding said, and tells the truth with a chance that goes with the place alone."""

    def __init__(self, said: dict[tuple[int, ...], list[int]], chance: float) -> None:
        self._said, self._chance = said, chance
        self.n_asked = self.n_right = 0
        self.open_slots: set[int] = set()
        self.closed: list[list[int]] = []

    def open(self, slot: int, salt: str, prompt_len: int) -> None:
        assert slot not in self.open_slots
        self.open_slots.add(slot)

    def close(self, slot: int, tokens: np.ndarray) -> None:
        self.open_slots.remove(slot)
        self.closed.append(tokens.tolist())

    def guess(self, slot: int, tokens: np.ndarray, n: int) -> list[int]:
        known = tuple(tokens.tolist())
        whole = next(list(prompt) + out for prompt, out in self._said.items() if known[: len(prompt)] == prompt)
        assert list(known) == whole[: len(known)], "the token table holds what was rejected"
        found = []
        for at in range(len(known), min(len(known) + n, len(whole))):
            is_right = random.Random(f"{whole[0]} {at}").random() < self._chance
            found.append(whole[at] if is_right else (whole[at] + 1) % VOCAB)
            self.n_asked, self.n_right = self.n_asked + 1, self.n_right + is_right
        return found


def requests() -> list[Request]:
    """Greedy and random ones, one with penalties (which takes no drafts), one that stops at a token."""
    made = []
    for i in range(N_REQUESTS):
        params = SamplingParams(
            temperature=0.0 if i % 2 else 0.9, top_p=0.9 if i == 2 else 1.0, presence_penalty=0.5 if i == 4 else 0.0,
            logprobs=1 if i == 5 else None, ignore_eos=i != 3,
        )  # fmt: skip
        prompt = [i + 3, *((7 * i + 5 * k) % (VOCAB - 10) for k in range(5 + 6 * i))]
        made.append(Request(
            request_id=f"r{i}", prompt_token_ids=prompt, params=params, max_tokens=MAX_TOKENS, seed=i,
            end_token_ids=list(range(0, VOCAB, 16)) if i == 3 else [],
        ))  # fmt: skip
    return made


def run(
    folder: pathlib.Path, depth: int, n_drafts: int, drafter: Drafter | None, n_pages: int = 60, **options: Any
) -> tuple[dict[str, list[int]], Scheduler]:
    """options: of the worker; by default it runs on a CPU."""
    folder.mkdir(exist_ok=True)
    worker = make_worker(folder, drafter=drafter, **options)
    worker.load()
    worker.allocate(Allocation(n_pages=n_pages, max_model_len=128))
    clock = MonotonicClock()
    scheduler = Scheduler(
        SchedulerConfig(
            n_pages=n_pages, page_size=8, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=128,
            pipeline_depth=depth, num_speculative_tokens=n_drafts, max_sampled=20,
        ),
        clock,
    )  # fmt: skip
    computes_alone = worker.platform.computes_alone
    executor = LaunchExecutor(worker) if computes_alone else ThreadExecutor(worker, worker.prepare)
    core = EngineCore(scheduler, executor, clock, depth)
    said: dict[str, list[int]] = {}
    try:
        for request in requests():
            core.handle(Submit(request))
        while core.has_work():
            for delta in core.step():
                assert delta.finish_reason is not FinishReason.ERROR, delta.failure
                said.setdefault(delta.request_id, []).extend(delta.token_ids)
    finally:
        core.shutdown()
    return said, scheduler


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[int]]:
    return run(tmp_path_factory.mktemp("plain"), 1, 0, None)[0]


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    n_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(n_threads)


@pytest.mark.parametrize("n_pages", [60, 22])
@pytest.mark.parametrize("chance", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_forced_random_acceptance(
    tmp_path: pathlib.Path, plain: dict[str, list[int]], depth: int, chance: float, n_pages: int
) -> None:
    """22 pages are too few for four sequences: some are preempted between their drafts."""
    known = {tuple(one.prompt_token_ids): plain[one.request_id] for one in requests()}
    drafter = KnowingDrafter(known, chance)
    said, scheduler = run(tmp_path, depth, 4, EachSequence(drafter), n_pages)
    assert said == plain
    wholes = [list(prompt) + out for prompt, out in known.items()]
    ended = [one for one in drafter.closed if one]  # warming up leaves nothing
    assert len(ended) >= N_REQUESTS - 4, "what leaves a slot is told when the next plan comes"
    assert all(any(one == whole[: len(one)] for whole in wholes) for one in ended)
    assert scheduler.stats().preemptions >= (n_pages == 22)
    n_tokens, n_steps = sum(map(len, plain.values())), scheduler.counters.steps
    assert drafter.n_asked > 50 and (chance == 0.0) == (drafter.n_right == 0)
    if chance == 1.0 and n_pages == 60:
        assert n_steps < n_tokens / 4, "right drafts save steps"


class DeviceApart(CallingDevice):
    """As a GPU, of which nobody asks how much memory it has."""


@pytest.fixture(scope="module")
def plain_apart(tmp_path_factory: pytest.TempPathFactory) -> Callable[[dict[str, Any], int], dict[str, list[int]]]:
    """What such a worker says without drafts, by its options and the depth; computed once each."""
    said: dict[tuple[bool, int], dict[str, list[int]]] = {}

    def plain(apart: dict[str, Any], depth: int) -> dict[str, list[int]]:
        key = apart["platform"].capturing is not None, depth
        if key not in said:
            said[key] = run(tmp_path_factory.mktemp("plain-apart"), depth, 0, None, **apart)[0]
        return said[key]

    return plain


@pytest.fixture(params=["captured", "eager"])
def apart(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Options of a worker whose device keeps its own tokens, and whose steps are launched two deep and more."""
    LivePlans(monkeypatch)
    monkeypatch.setattr(platform.cuda, "CudaDevice", DeviceApart)
    captures = request.param == "captured"
    most = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 9}}  # fewer rows than steps have
    return {"platform": CudaPlatform(captures=captures), "dtype": "float32", **most}


@pytest.mark.parametrize("n_pages", [60, 22])
@pytest.mark.parametrize("chance", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_device_apart(
    tmp_path: pathlib.Path, apart: dict[str, Any], plain_apart: Callable[[dict[str, Any], int], dict[str, list[int]]],
    depth: int, chance: float, n_pages: int,
) -> None:  # fmt: skip
    """The host's copy of the tokens is right when drafts begin, whoever left his slot meanwhile."""
    expected = plain_apart(apart, depth)
    known = {tuple(one.prompt_token_ids): expected[one.request_id] for one in requests()}
    drafter = KnowingDrafter(known, chance)
    assert run(tmp_path, depth, 4, EachSequence(drafter), n_pages, **apart)[0] == expected
    assert drafter.n_asked > 50 and (chance == 0.0) == (drafter.n_right == 0)


class Noting:
    """Guesses nothing, and remembers what it was shown."""

    def __init__(self) -> None:
        self.shown: list[list[int]] = []

    def open(self, slot: int, salt: str, prompt_len: int) -> None: ...

    def close(self, slot: int, tokens: np.ndarray) -> None: ...

    def guess(self, slot: int, tokens: np.ndarray, n: int) -> list[int]:
        self.shown.append(tokens.tolist())
        return []


def test_a_late_result_of_another_sequence_in_the_slot(tmp_path: pathlib.Path, apart: dict[str, Any]) -> None:
    drafter = Noting()
    worker = make_worker(tmp_path, drafter=EachSequence(drafter), **apart)
    worker.load()
    worker.allocate(Allocation(n_pages=9, max_model_len=64))
    first, second, page = list(range(5, 11)), list(range(40, 50)), PageAppend(0, 0, [1, 2])
    launched = [worker.launch(plan) for plan in (
        StepPlan(0, **spans((0, 0, 6, True)), opened=[SlotOpen(0, first, 6, PARAMS)], pages=[page]),
        StepPlan(1, **spans((0, 6, 1, True))),
        StepPlan(2, **spans((0, 0, 10, True)), closed=[0], opened=[SlotOpen(0, second, 10, PARAMS)], pages=[page]),
    )]  # fmt: skip
    said = [one.result().tokens for one in launched]
    drafted = Spans([0], [10], [3], [2], [True])
    worker.launch(StepPlan(3, drafted, 3)).result()
    assert drafter.shown == [[*second, *said[2]]]


class Reading(Noting):
    """Guesses by pages, as the device knows them."""

    tables: SlotTables

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[list[int]] = []

    def guess(self, slot: int, tokens: np.ndarray, n: int) -> list[int]:
        self.entries.append(self.tables.pages[0, slot, :3].tolist())
        return [7] * n


def test_pages_of_a_step_are_there_when_it_is_guessed(tmp_path: pathlib.Path, apart: dict[str, Any]) -> None:
    drafter = Reading()
    worker = make_worker(tmp_path, drafter=EachSequence(drafter), **apart)
    worker.load()
    worker.allocate(Allocation(n_pages=9, max_model_len=64))
    drafter.tables = worker.runner.tables
    opened, pages = [SlotOpen(0, list(range(5, 11)), 6, PARAMS)], [PageAppend(0, 0, [4])]
    worker.launch(StepPlan(0, **spans((0, 0, 6, True)), opened=opened, pages=pages)).result()
    drafted = Spans([0], [6], [4], [3], [True])
    worker.launch(StepPlan(1, drafted, 4, pages=[PageAppend(0, 1, [8])])).result()
    assert drafter.entries == [[4, 8, 0]]


def test_prompt_lookup(tmp_path: pathlib.Path, plain: dict[str, list[int]]) -> None:
    assert run(tmp_path, 2, 3, EachSequence(NgramDrafter(1, 3)))[0] == plain


def test_ngram_takes_the_latest_and_longest() -> None:
    tokens = np.array([1, 2, 3, 9, 2, 3, 8, 5, 2, 3], np.int32)
    assert NgramDrafter(1, 3).guess(0, tokens, 2) == [8, 5]
    assert NgramDrafter(2, 4).guess(0, np.array([7, 1, 2, 3, 4, 1, 2, 3], np.int32), 9) == [4, 1, 2, 3]
    assert NgramDrafter(2, 4).guess(0, np.array([1, 2, 3], np.int32), 9) == []
    assert NgramDrafter(1, 4).guess(0, np.array([5], np.int32), 9) == []
    assert NgramDrafter(1, 2).guess(0, np.array([5, 5], np.int32), 2) == [5]
