"""Heads where the device keeps its own tokens, as a GPU does: guesses are the oracle's, by operations and captured."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import head_case
import mtp_case
import numpy as np
import pytest
import torch
from calling_device import CallingDevice, LiveChains, LivePlans, MovingPlan
from family_cases import random_checkpoint
from head_case import Guess, all_right, drafting, watched, work

from quire import SamplingParams
from quire.compute import platform
from quire.compute.draft.head_graphs import HeadGraphs, chain_sizes
from quire.compute.draft.head_steps import EagerSteps, HeadRows
from quire.compute.platform import CudaPlatform
from quire.compute.runner.features import Features
from quire.engine import workers

pytestmark = pytest.mark.usefixtures("timed_briefly")

TAPS = (1, 2, 4)
SIZE: dict[str, Any] = {"num_gpu_blocks_override": 200, "max_num_seqs": 64, "max_num_batched_tokens": 128}
OPTIONS: dict[str, dict[str, Any]] = {
    "whole prompts": {},
    "prompts in parts": {"max_num_batched_tokens": 16, "max_num_seqs": 4},
    "few pages": {"num_gpu_blocks_override": 15, "max_num_seqs": 6},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def oracle(folder: pathlib.Path) -> head_case.Oracle:
    model = random_checkpoint(folder, "Llama", num_hidden_layers=6, max_position_embeddings=256)
    head_case.write(folder / "head", eagle_aux_hidden_state_layer_ids=list(TAPS))
    return head_case.Oracle(model, folder / "head", TAPS)


@pytest.fixture(scope="module")
def said(folder: pathlib.Path, oracle: head_case.Oracle) -> list[list[int]]:
    """On a CPU and without a head; no device, number of pages or cut of prompts changes a token."""
    plain = drafting(folder, **SIZE)
    found = work(plain)
    plain.shutdown()
    return found


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Guess]:
    return watched(monkeypatch)


@pytest.fixture(params=["captured", "eager"])
def captures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    """Engines have a device apart from now on."""
    n_threads, found = torch.get_num_threads(), request.param == "captured"
    LivePlans(monkeypatch)
    LiveChains(monkeypatch)
    monkeypatch.setattr(platform.cuda, "CudaDevice", CallingDevice)
    monkeypatch.setattr(workers, "platform_of", lambda config, rank: CudaPlatform(captures=found))
    yield found
    torch.set_num_threads(n_threads)


def counted(monkeypatch: pytest.MonkeyPatch, where: type, name: str) -> list[object]:
    """What a method was called with from now on."""
    calls: list[object] = []
    real = getattr(where, name)
    monkeypatch.setattr(where, name, lambda self, *given: calls.append(given) or real(self, *given))
    return calls


@pytest.mark.parametrize("options", OPTIONS)
def test_guesses_of_a_head(
    folder: pathlib.Path,
    oracle: head_case.Oracle,
    said: list[list[int]],
    seen: list[Guess],
    captures: bool,
    monkeypatch: pytest.MonkeyPatch,
    options: str,
) -> None:
    speculative = {"method": "eagle3", "model": str(folder / "head")}
    llm = drafting(folder, speculative_config=speculative, **SIZE | OPTIONS[options])
    seen.clear()  # what was timed at the start
    by_operations = counted(monkeypatch, EagerSteps, "chain")
    assert work(llm) == said
    assert bool(by_operations) != captures, "every chain is captured, or none"
    stats = llm.stats()
    llm.shutdown()
    assert len(seen) > 60 and stats.prefix_hits > 0
    assert (stats.preemptions > 0) == (options == "few pages")
    assert all_right(oracle, seen)


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[pathlib.Path, mtp_case.Oracle]]:
    folders = {case: tmp_path_factory.mktemp(case) for case in mtp_case.CASES}
    return {case: (folder, mtp_case.write(folder, case)) for case, folder in folders.items()}


@pytest.mark.parametrize("case", mtp_case.CASES)
def test_guesses_of_a_module(
    modules: dict[str, tuple[pathlib.Path, mtp_case.Oracle]], seen: list[Guess], captures: bool, case: str
) -> None:
    model, oracle = modules[case]
    llm = drafting(model, speculative_config={"method": "mtp"}, **SIZE)
    seen.clear()
    work(llm)
    llm.shutdown()
    assert len(seen) > 60 and all_right(oracle, seen, 60)


def short(folder: pathlib.Path, seen: list[Guess]) -> None:
    """Prompts of other lengths and few tokens, with room for drafts of all."""
    speculative = {"method": "eagle3", "model": str(folder / "head")}
    llm = drafting(folder, speculative_config=speculative, **SIZE | {"max_num_seqs": 48})
    llm.engine.scheduler.live.drafts.costs = None  # nobody is left alone
    seen.clear()
    prompts = [{"prompt_token_ids": [(n * i + 3) % 250 for i in range(20 + n)]} for n in range(1, 9)]
    llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))
    llm.shutdown()


def rows_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MovingPlan, "place", lambda self, positions: None)


def planted(monkeypatch: pytest.MonkeyPatch, where: Any, name: str, change: Callable[..., None]) -> None:
    """change: told of the arguments of each call when it is done."""
    real = getattr(where, name)

    def call(*given: Any, **options: Any) -> Any:
        found = real(*given, **options)
        change(*given)
        return found

    monkeypatch.setattr(where, name, call)


def late_places(monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch, HeadGraphs, "_begin", lambda self, size, plan: self._place.sub_(1))


def the_model_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Features, "_write", lambda self, cache_locs, features: None)


@pytest.mark.parametrize("captures", ["captured"], indirect=True)
@pytest.mark.parametrize(
    "plant", [None, rows_stay, late_places, the_model_leaves_nothing]
)  # fmt: skip
def test_planted_bugs_are_caught(
    folder: pathlib.Path,
    oracle: head_case.Oracle,
    seen: list[Guess],
    monkeypatch: pytest.MonkeyPatch,
    captures: bool,
    plant: Callable[[pytest.MonkeyPatch], None] | None,
) -> None:
    if plant is not None:
        plant(monkeypatch)
    short(folder, seen)
    assert len(seen) > 16 and all_right(oracle, seen) == (plant is None)


def test_chains_write_where_rows_and_wanted_guesses_stand(
    folder: pathlib.Path, oracle: head_case.Oracle, seen: list[Guess], captures: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages that a sequence was not given may be another's: guesses beyond those wanted must not reach them."""
    steps, name, n_uneven, n_late = (HeadGraphs, "queue", 0, 0) if captures else (EagerSteps, "chain", 0, 0)
    real = getattr(steps, name)

    def chain(self: Any, rows: HeadRows, n_drafts: Sequence[int], *, is_late: bool = False) -> Any:
        nonlocal n_uneven, n_late
        before = [one.clone() for one in (self._pool.k, self._pool.v)]
        found = real(self, rows, n_drafts, **{"is_late": is_late} if captures else {})
        ends = self._tables.ends[rows.span_slots].numpy() if captures else rows.kv_lens - 1
        allowed = torch.zeros(before[0].shape[1] * before[0].shape[3], dtype=torch.bool)
        allowed[: before[0].shape[3]] = True  # page 0
        for slot, end, n_rows, n in zip(rows.span_slots, ends, np.diff(rows.q_indptr), n_drafts, strict=True):
            positions = np.arange(end + 1 - n_rows, end + n)
            allowed[self._tables.cache_locs(np.full(len(positions), slot), positions)[0]] = True
        for old, new in zip(before, (self._pool.k, self._pool.v), strict=True):
            changed = (old != new).any(-1).any(2).any(0).flatten()  # [pages, page size]
            assert not (changed & ~allowed).any()
        n_uneven, n_late = n_uneven + (len(set(n_drafts)) > 1), n_late + is_late
        return found

    monkeypatch.setattr(steps, name, chain)
    short(folder, seen)
    assert n_uneven > 3 and (n_late > 3) == captures


@pytest.mark.parametrize("captures", ["captured"], indirect=True)
def test_its_graphs_are_counted(folder: pathlib.Path, oracle: head_case.Oracle, captures: bool) -> None:
    speculative = {"method": "eagle3", "model": str(folder / "head")}
    llm = drafting(folder, speculative_config=speculative, **SIZE | {"max_num_seqs": 8})
    worker: Any = llm.engine.executor.worker
    own, limits = worker.captured(), worker._limits
    llm.shutdown()
    assert own.graph_sizes == (*worker.platform.captured(worker.arch, limits).graph_sizes, 1, 2, 4, 8)
    assert [chain_sizes(n, 4) for n in (1, 3, 600)] == [[1], [1, 2, 3], [1, 2, 4, 8, 16, 32, 64, 128, 256]]
    assert chain_sizes(600, 24)[-1] == 1536 // 16
