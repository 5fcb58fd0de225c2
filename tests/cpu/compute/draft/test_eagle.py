"""Guesses of a head against an oracle of transformers' modules, whatever was computed, shared or rejected before."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from family_cases import random_checkpoint
from head_case import HEAD, Guess, Oracle, all_right, drafting, tensors_of, watched, work, write

from quire import LLM, SamplingParams
from quire.compute.draft import eagle, head_steps, with_head
from quire.compute.draft.drafter import DraftContext
from quire.compute.forward.eager import EagerForward
from quire.compute.forward.fused import FusedForward
from quire.kernels.fused_step import FusedStep

pytestmark = pytest.mark.usefixtures("timed_briefly")

TAPS = (1, 2, 4)
OPTIONS: dict[str, dict[str, Any]] = {
    "whole prompts": {},
    "prompts in parts": {"max_num_batched_tokens": 16, "max_num_seqs": 4},
    "few pages": {"num_gpu_blocks_override": 15, "max_num_seqs": 6},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def oracle(folder: pathlib.Path) -> Oracle:
    model = random_checkpoint(folder, "Llama", num_hidden_layers=6, max_position_embeddings=256)
    write(folder / "head", eagle_aux_hidden_state_layer_ids=list(TAPS))
    return Oracle(model, folder / "head", TAPS)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Guess]:
    return watched(monkeypatch)


def make(folder: pathlib.Path, **options: Any) -> LLM:
    return drafting(folder, **{"speculative_config": {"method": "eagle3", "model": str(folder / "head")}} | options)


@pytest.fixture(scope="module")
def said(folder: pathlib.Path, oracle: Oracle) -> list[list[int]]:
    """Without a head; how many pages there are and how prompts are cut changes no token."""
    plain = make(folder, speculative_config=None)
    found = work(plain)
    plain.shutdown()
    return found


@pytest.mark.parametrize("options", OPTIONS)
def test_guesses_are_the_oracles(
    folder: pathlib.Path, oracle: Oracle, said: list[list[int]], seen: list[Guess], options: str
) -> None:
    llm = make(folder, **OPTIONS[options])
    seen.clear()  # what was timed at the start
    assert work(llm) == said
    stats = llm.stats()
    llm.shutdown()
    assert len(seen) > 60 and stats.prefix_hits > 0
    assert (stats.preemptions > 0) == (options == "few pages")
    assert all_right(oracle, seen)


@pytest.mark.parametrize("part", ["head", "model"])
def test_operation_by_operation(
    folder: pathlib.Path,
    oracle: Oracle,
    seen: list[Guess],
    monkeypatch: pytest.MonkeyPatch,
    part: str,
) -> None:
    """Where the head, or the model, has no native step, features and guesses are the same."""
    if part == "head":
        monkeypatch.setattr(with_head, "obstacle", lambda head: "told so")
    else:
        monkeypatch.setattr(FusedForward, "run", lambda self, step: None)
        monkeypatch.setattr(FusedForward, "ready", lambda self, step, start_s: None)
    llm = make(folder)
    seen.clear()
    work(llm)
    llm.shutdown()
    assert len(seen) > 60 and all_right(oracle, seen)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("family", ["Llama", "Gemma2"])
def test_features_of_a_prompt(tmp_path: pathlib.Path, dtype: str, family: str) -> None:
    """By a native step of a plain model (beside keys of 8 bits), and by the operations of another; in any type."""
    model = random_checkpoint(tmp_path, family, num_hidden_layers=6, max_position_embeddings=256)
    head = write(tmp_path / "head", eagle_aux_hidden_state_layer_ids=list(TAPS))
    speculative = {"method": "eagle3", "model": str(head)}
    llm = make(
        tmp_path, dtype=dtype, kv_cache_dtype="int8" if family == "Llama" else "auto", speculative_config=speculative,
        max_num_seqs=1, disable_hybrid_kv_cache_manager=True,
    )  # fmt: skip
    tokens = [3 * i % 250 for i in range(40)]
    llm.generate([{"prompt_token_ids": tokens}], SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True))
    runner = llm.engine.executor.worker.runner
    locs = runner.tables.cache_locs(np.zeros(40, np.int64), np.arange(40))[0]
    found = torch.zeros(40, 64, dtype=getattr(torch, dtype))
    runner.pool.features.read(torch.from_numpy(locs), found)
    llm.shutdown()
    expected = Oracle(model, head, TAPS).features(tokens)
    scale = expected.abs().max()
    apart = (found.float() - expected).abs()
    assert apart.mean() < 0.02 * scale and (dtype != "float32" or apart.max() < 0.02 * scale)


def test_steps_stay_native(folder: pathlib.Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make(folder)
    steps: list[object] = []
    real = EagerForward.run
    monkeypatch.setattr(EagerForward, "run", lambda self, step: steps.append(step) or real(self, step))
    work(llm)
    llm.shutdown()
    assert not steps


def late_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    real = head_steps.HeadRows.behind

    def behind(self: head_steps.HeadRows, n: int, place: int) -> head_steps.HeadRows:
        rows = real(self, n, place)
        rows.positions -= 1
        return rows

    monkeypatch.setattr(with_head, "obstacle", lambda head: "told so")
    monkeypatch.setattr(head_steps.HeadRows, "behind", behind)


def ids_of_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own numbers are taken for the model's."""
    real = FusedStep.chain
    monkeypatch.setattr(FusedStep, "chain", lambda self, *args, ids: real(self, *args))


def features_of_the_token_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(with_head, "obstacle", lambda head: "told so")
    monkeypatch.setattr(head_steps.np, "maximum", lambda a, b: np.clip(np.asarray(a) + 1, 0, None))


def guesses_count_as_read(monkeypatch: pytest.MonkeyPatch) -> None:
    real = eagle.EagleDrafter.guess

    def guess(self: Any, contexts: Sequence[DraftContext]) -> list[list[int]]:
        found = real(self, contexts)
        for context in contexts:
            self._n_read[context.slot] += context.most - 1
        return found

    monkeypatch.setattr(eagle.EagleDrafter, "guess", guess)


def pages_are_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence takes the pages that it was given for its own."""
    monkeypatch.setattr(eagle.FilledPages, "found", lambda self, slot, tokens: len(tokens) // 16 * 16)


def features_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    from quire.compute.runner.features import Features

    monkeypatch.setattr(Features, "copy", lambda self, copies: None)


@pytest.mark.parametrize(
    "plant",
    [
        late_positions, ids_of_the_head, features_of_the_token_itself, guesses_count_as_read, pages_are_trusted,
        features_are_not_copied,
    ],
)  # fmt: skip
def test_planted_bugs_are_caught(
    folder: pathlib.Path,
    oracle: Oracle,
    said: list[list[int]],
    seen: list[Guess],
    monkeypatch: pytest.MonkeyPatch,
    plant: Callable[[pytest.MonkeyPatch], None],
) -> None:
    """And the tokens are the same all the same: drafts are only drafts."""
    plant(monkeypatch)
    llm = make(folder)
    seen.clear()
    assert work(llm) == said
    llm.shutdown()
    assert not all_right(oracle, seen)


def test_the_whole_vocabulary_needs_no_map(folder: pathlib.Path, oracle: Oracle, seen: list[Guess]) -> None:
    tensors = tensors_of(HEAD | {"draft_vocab_size": 256})
    del tensors["d2t"], tensors["t2d"]
    taps = [layer - 1 for layer in TAPS]  # those that leave the states
    write(folder / "whole", tensors, draft_vocab_size=256, eagle_config={"eagle_aux_hidden_state_layer_ids": taps})
    llm = make(folder, speculative_config={"method": "eagle3", "model": str(folder / "whole")})
    seen.clear()
    work(llm)
    llm.shutdown()
    tensors["d2t"] = torch.zeros(256, dtype=torch.int64)
    own = Oracle(oracle.model, write(folder / "mapped", tensors, draft_vocab_size=256), TAPS)
    assert all_right(own, seen)
