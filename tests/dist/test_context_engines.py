"""Engines whose ranks share the tokens of steps say what one rank says: processes beside this one, which is rank 0."""

from __future__ import annotations

import functools
import pathlib
from typing import Any

import pytest
from rank_cases import NGRAM, SIZE, answers, checkpoint

from quire import LLM
from quire.control.draft_policy import DraftPolicy
from quire.core.errors import ConfigError
from quire.engine.ranks import group


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


@pytest.mark.parametrize("name, n_ranks, method, n_pages", [
    ("gemma3", 2, "ulysses", 24), ("llama", 2, "ring", 9), ("gemma3", 4, "auto", 30),  # the last one: both
])  # fmt: skip
def test_ranks_say_what_one_says(name: str, n_ranks: int, method: str, n_pages: int, folder: pathlib.Path) -> None:
    model = checkpoint(name, folder / name)
    expected = answers_of(model)
    options = {"prefill_context_parallel_size": n_ranks, "context_parallel_method": method}
    if n_ranks == 2:
        options |= {"enable_sleep_mode": True, "speculative_config": NGRAM}
    llm = LLM(model, **{**SIZE, "num_gpu_blocks_override": n_pages, **options})
    if n_ranks == 2:
        llm.engine.scheduler.live.drafts = DraftPolicy(3, None)  # as many as there may be, whatever steps take here
    try:
        assert answers(llm) == expected
        stats = llm.stats()
        assert stats.prefix_hits > 0 and (stats.preemptions > 0 or name == "gemma3")
        assert (stats.accepted_tokens > 0) is (n_ranks == 2)
        if options.get("enable_sleep_mode"):
            llm.sleep(1)
            llm.wake_up()
            assert answers(llm) == expected
    finally:
        llm.shutdown()


@pytest.mark.parametrize("name, options, message", [
    ("qwen3", {"tensor_parallel_size": 2}, "and tensor_parallel_size = 2: ranks that divide tokens have all weights"),
    ("qwen3", {"pipeline_parallel_size": 2}, "and pipeline_parallel_size = 2: ranks that divide tokens"),
    ("qwen3", {"data_parallel_size": 2}, "and data_parallel_size = 2: ranks that divide tokens"),
    ("qwen3", {"device": "null"}, "and device = 'null', which has no model"),
    ("qwen3", {"deterministic": True}, "prefill_context_parallel_size = 2: whether the tokens"),
    ("qwen3", {"enable_lora": True}, "enable_lora works on.*where each rank has all tokens of a step.*size = 2"),
    ("qwen3", {"prefill_context_parallel_size": 3, "context_parallel_method": "ulysses"},
     "attention has 4 query heads, which 3 ranks cannot share equally.*take ring"),
    ("qwen3", {"context_parallel_method": "ring", "speculative_config": {"method": "suffix", "branching": 2}},
     "trees of drafts.*take ulysses"),
    ("qwen3", {"speculative_config": {"method": "draft_model", "model": "MODEL"}},
     "has weights, which ranks that share tokens"),
    ("qwen3", {"prefill_context_parallel_size": 4, "context_parallel_method": "ring", "ulysses_degree": 3},
     "ulysses_degree = 3 does not divide prefill_context_parallel_size = 4"),
    ("deepseek_v2", {"context_parallel_method": "ring", "ulysses_degree": 2}, "ulysses_degree = 2: its heads read one"),
    ("qwen3", {"prefill_context_parallel_size": 32}, "exceeds max_num_batched_tokens = 24"),
    ("deepseek_v2", {"context_parallel_method": "ulysses"}, "its heads read one line a token.*take ring"),
    ("qwen2_moe", {"enable_expert_parallel": True}, "each of these ranks has all experts"),
    ("gpt_oss", {"context_parallel_method": "ring"}, "its heads have sinks.*take ulysses"),
    ("falcon-alibi-parallel", {"context_parallel_method": "ring"}, "ALiBi.*take ulysses"),
    ("mamba2", {}, "has recurrent layers, whose tokens follow each other"),
])  # fmt: skip
def test_what_cannot_be(
    name: str, options: dict[str, Any], message: str, folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = checkpoint(name, folder / name)
    monkeypatch.setattr(group.RankGroup, "start", lambda self: pytest.fail("a process was to be started"))
    if "model" in options.get("speculative_config", {}):
        options = {**options, "speculative_config": {**options["speculative_config"], "model": model}}
    with pytest.raises(ConfigError, match=message):
        LLM(model, **{**SIZE, "prefill_context_parallel_size": 2, **options})
