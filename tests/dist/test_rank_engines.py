"""Engines of several ranks say what one rank says, whatever else an engine does: chunks, prefixes, preemption, drafts,
masks. Processes beside this one, which is rank 0."""

from __future__ import annotations

import functools
import logging
import os
import pathlib
import re
import signal
from typing import Any

import pytest
from rank_cases import FAMILIES, NGRAM, SIZE, answers, checkpoint

from quire import LLM
from quire.control.draft_policy import DraftPolicy
from quire.core.errors import EngineError

TIGHT = {"gemma2": 24}
"""Pages, 18 for others: enough for a draft and too few for the prompts that begin together, also where requests with a
grammar come after all others."""
TIGHT_DATA = 16
"""Of each data-parallel rank: any two long requests that share nothing are too many for it, whichever it gets."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tmp_path_factory.mktemp("models")


@functools.cache
def answers_of(model: str) -> list[Any]:
    """Of one rank."""
    llm = LLM(model, **SIZE)
    try:
        return answers(llm)
    finally:
        llm.shutdown()


@pytest.mark.parametrize("name", FAMILIES)
def test_two_ranks_say_what_one_says(name: str, folder: pathlib.Path) -> None:
    model = checkpoint(name, folder / name)
    expected = answers_of(model)
    size = SIZE | {"num_gpu_blocks_override": TIGHT.get(name, 18)}
    llm = LLM(model, **size, tensor_parallel_size=2, speculative_config=NGRAM)
    llm.engine.scheduler.live.drafts = DraftPolicy(3, None)  # as many as there may be, whatever steps take here
    try:
        assert answers(llm) == expected
        stats = llm.stats()
        assert stats.preemptions > 0 and stats.prefix_hits > 0 and stats.accepted_tokens > 0
    finally:
        llm.shutdown()


@pytest.mark.parametrize("name, n_ranks, options", [
    ("qwen2_moe", 2, {"enable_expert_parallel": True, "speculative_config": NGRAM}),
    ("deepseek_v2", 4, {"enable_expert_parallel": True}),
])  # fmt: skip
def test_experts_may_be_divided_among_ranks(
    name: str, n_ranks: int, options: dict[str, Any], folder: pathlib.Path
) -> None:
    model = checkpoint(name, folder / name)
    llm = LLM(model, **SIZE, tensor_parallel_size=n_ranks, **options)
    try:
        assert answers(llm) == answers_of(model)
        assert llm.expert_loads(), "the router of each rank knows all experts"
    finally:
        llm.shutdown()


def assert_counted(llm: LLM) -> None:
    """Figures of experts are of the rows of all ranks, each counted once."""
    while llm.engine.has_work():  # a step that was begun before the last sequence ended
        llm.engine.step()
    loads = llm.expert_loads()
    assert not loads or sum(loads[0]) == 3 * llm.stats().computed_tokens


@pytest.mark.parametrize("name, options", [
    ("qwen3", {"enable_sleep_mode": True}),
    ("qwen3_next", {"enable_expert_parallel": True, "enable_sleep_mode": True}),
    ("deepseek_v2", {"enable_expert_parallel": True, "tensor_parallel_size": 2}),
])  # fmt: skip
def test_data_parallel_ranks_say_what_one_says(name: str, options: dict[str, Any], folder: pathlib.Path) -> None:
    model = checkpoint(name, folder / name)
    llm = LLM(model, **SIZE | {"num_gpu_blocks_override": TIGHT_DATA}, data_parallel_size=2, **options)
    live = llm.engine.scheduler.live
    entered = set[int]()
    real = live.admit
    live.admit = lambda seq, *rest: (entered.add(seq.dp_rank), real(seq, *rest))[1]  # type: ignore[method-assign,assignment]
    try:
        assert answers(llm) == answers_of(model)
        stats = llm.stats()
        assert entered == {0, 1} and stats.preemptions > 0 and stats.prefix_hits > 0
        assert_counted(llm)
        if "enable_sleep_mode" in options:
            llm.sleep(2)
            llm.wake_up()
            assert answers(llm) == answers_of(model)
            assert_counted(llm)
        pid = llm.engine.ranks.pids[-1]
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(EngineError, match=rf"rank \d \(process {pid}\) ended with SIGKILL"):
            llm.generate(["one", "two", "six"], use_tqdm=False)
    finally:
        llm.shutdown()


@pytest.mark.parametrize("divided, part", [("tensor", "its part of "), ("pipeline", "its part of "), ("data", "")])
def test_what_was_asked_for_is_no_warning_and_a_part_of_the_weights_is_called_one(
    divided: str, part: str, folder: pathlib.Path, caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    caplog.set_level(logging.INFO, "quire.engine")
    LLM(checkpoint("qwen3", folder / "qwen3"), **SIZE, **{f"{divided}_parallel_size": 2}).shutdown()
    assert len(re.findall(f"weights: {part}[0-9.]+ M parameters", caplog.text)) == 1
    levels = [one.levelno for one in caplog.records if "operation by operation: its layers" in one.message]
    assert levels == ([logging.INFO] if part else [])
    assert "WARNING" not in caplog.text + capfd.readouterr().err
