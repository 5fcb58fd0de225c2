"""Engines whose layers are divided among the stages of a pipeline say what one rank says, and a lost stage is named."""

from __future__ import annotations

import os
import pathlib
import signal
from typing import Any

import pytest
from rank_cases import NGRAM, SIZE, answers, checkpoint

from quire import LLM, SamplingParams
from quire.core.errors import ConfigError, EngineError
from quire.engine.ranks import group

FEW = SamplingParams(temperature=0, max_tokens=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tmp_path_factory.mktemp("models")


def check_answers(llm: LLM, model: str) -> None:
    """Those of one rank, although prompts are cut, found in the cache, and computed again."""
    one = LLM(model, **SIZE)
    try:
        assert answers(llm) == answers(one)
    finally:
        one.shutdown()
    stats = llm.stats()
    assert stats.preemptions > 0 and stats.prefix_hits > 0


def test_two_stages_of_two_ranks_say_what_one_rank_says(folder: pathlib.Path) -> None:
    """With windows, a factor on the embeddings, and a head that is the embedding: two of three layers in the last
    stage, as asked for, where the first would have them."""
    model = checkpoint("gemma2", folder / "gemma2")
    llm = LLM(model, **SIZE, pipeline_parallel_size=2, tensor_parallel_size=2, pp_layer_partition="1,2")
    try:
        check_answers(llm, model)
    finally:
        llm.shutdown()


def test_stages_sleep_and_a_stopped_one_is_named(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = checkpoint("deepseek_v2", folder / "deepseek_v2")
    llm = LLM(model, **SIZE, pipeline_parallel_size=2, enable_sleep_mode=True)
    check_answers(llm, model)
    expected = llm.generate(["one"], FEW, use_tqdm=False)[0].outputs[0].token_ids
    first = llm.engine.executor._own.worker.runner  # type: ignore[attr-defined]
    assert not first._asked, "without work no message of a stage waits to be received"
    for level in (1, 2):
        llm.sleep(level)
        llm.wake_up()
        assert llm.generate(["one"], FEW, use_tqdm=False)[0].outputs[0].token_ids == expected
    assert llm.engine.ranks is not None
    (pid,) = llm.engine.ranks.pids
    monkeypatch.setattr(group, "LOST_S", 0.8)
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(EngineError, match=rf"rank 1 \(process {pid}\), stopped by a signal, made no progress"):
        llm.generate(["one"], FEW, use_tqdm=False)
    llm.shutdown()


@pytest.mark.parametrize("options, message", [
    ({"pipeline_parallel_size": 9}, r"pipeline_parallel_size = 9: qwen3 has \d+ layers, and each stage needs one"),
    ({"pipeline_parallel_size": 2, "speculative_config": NGRAM}, "pipeline_parallel_size = 2 and speculative_config"),
    ({"pipeline_parallel_size": 2, "device": "null"}, "pipeline_parallel_size = 2 and device = 'null'"),
])  # fmt: skip
def test_what_a_pipeline_cannot_do(
    options: dict[str, Any], message: str, folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = checkpoint("qwen3", folder / "qwen3")
    monkeypatch.setattr(group.RankGroup, "start", lambda self: pytest.fail("a process was to be started"))
    with pytest.raises(ConfigError, match=message):
        LLM(model, **{**SIZE, **options})
