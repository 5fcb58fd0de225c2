"""Engines of several ranks say what one rank says, whatever else an engine does: chunks, prefixes, preemption, drafts,
masks. Processes beside this one, which is rank 0."""

from __future__ import annotations

import functools
import pathlib
from typing import Any

import pytest
from rank_cases import FAMILIES, NGRAM, SIZE, answers, checkpoint

from quire import LLM
from quire.control.draft_policy import DraftPolicy
from quire.planner.drafts import DraftCosts

FREE = DraftCosts((1, 2), (1.0, 1.0), guess_s=0.0)
"""Drafts cost nothing, however busy the machine is: they are tried."""


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
    llm = LLM(model, **SIZE, tensor_parallel_size=2, speculative_config=NGRAM)
    llm.engine.scheduler.live.drafts = DraftPolicy(3, FREE)
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
