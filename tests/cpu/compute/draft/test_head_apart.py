"""Heads where the device keeps its own tokens, as a GPU does: guesses are the oracle's, by operations and captured."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import head_case
import mtp_case
import pytest
import torch
from calling_device import CallingDevice, LiveChains, LivePlans
from family_cases import random_checkpoint
from head_case import Guess, drafting, watched, work, wrong

from quire.compute import platform
from quire.compute.platform import CudaPlatform
from quire.engine import build

TAPS = (1, 2, 4)
SIZE: dict[str, Any] = {"num_gpu_blocks_override": 200, "max_num_seqs": 8, "max_num_batched_tokens": 64}
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
    monkeypatch.setattr(build, "platform_of", lambda config: CudaPlatform(captures=found))
    yield found
    torch.set_num_threads(n_threads)


@pytest.mark.parametrize("options", OPTIONS)
def test_guesses_of_a_head(
    folder: pathlib.Path, oracle: head_case.Oracle, seen: list[Guess], captures: bool, options: str
) -> None:
    plain = drafting(folder, **SIZE | OPTIONS[options])
    said = work(plain)
    plain.shutdown()
    speculative = {"method": "eagle3", "model": str(folder / "head")}
    llm = drafting(folder, speculative_config=speculative, **SIZE | OPTIONS[options])
    seen.clear()  # what was timed at the start
    assert work(llm) == said
    stats = llm.stats()
    llm.shutdown()
    assert len(seen) > 60 and stats.prefix_hits > 0
    assert (stats.preemptions > 0) == (options == "few pages")
    assert wrong(oracle, seen, 100) == 0


@pytest.mark.parametrize("case", mtp_case.CASES)
def test_guesses_of_a_module(tmp_path: pathlib.Path, seen: list[Guess], captures: bool, case: str) -> None:
    oracle = mtp_case.write(tmp_path, case)
    llm = drafting(tmp_path, speculative_config={"method": "mtp"}, **SIZE)
    seen.clear()
    work(llm)
    llm.shutdown()
    assert len(seen) > 60 and wrong(oracle, seen, 60) == 0
