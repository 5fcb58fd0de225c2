"""Engines whose experts move between ranks while they serve say what one rank says; a rank that is lost is named."""

from __future__ import annotations

import os
import pathlib
import signal
from typing import Any

import pytest
from rank_cases import SIZE, answers, checkpoint

from quire import LLM, SamplingParams
from quire.core.balance import BalanceFacts
from quire.core.errors import ConfigError, EngineError
from quire.engine.ranks import group

LONG = SamplingParams(temperature=0, max_tokens=90, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tmp_path_factory.mktemp("models")


def facts_of(llm: LLM) -> BalanceFacts:
    facts = llm.stats().expert_balance
    assert facts is not None
    return facts


@pytest.mark.parametrize("name, options, eplb", [
    ("mixtral", {"tensor_parallel_size": 2}, {"num_redundant_experts": 3, "step_interval": 7, "window_size": 4}),
    ("qwen3_moe", {"data_parallel_size": 2, "enable_sleep_mode": True},
     {"num_redundant_experts": 4, "step_interval": 6, "window_size": 6}),
])  # fmt: skip
def test_experts_move_while_they_serve(
    name: str, options: dict[str, Any], eplb: dict[str, int], folder: pathlib.Path
) -> None:
    model = checkpoint(name, folder / name)
    alone = LLM(model, **SIZE)
    expected = answers(alone)
    alone.shutdown()
    llm = LLM(model, **SIZE, **options, enable_expert_parallel=True, enable_eplb=True, eplb_config=eplb)
    try:
        assert answers(llm) == expected
        facts = facts_of(llm)
        assert facts.n_rearranged >= 2 and facts.n_moved > 0 and facts.moved_bytes > 0 and facts.longest_s > 0
        assert 1 <= facts.after <= facts.before <= 2 and llm.stats().preemptions > 0
        for level in (1, 2) if "enable_sleep_mode" in options else ():
            llm.sleep(level)
            llm.wake_up()
            assert answers(llm) == expected
        assert facts_of(llm).n_moved > facts.n_moved or "enable_sleep_mode" not in options
        assert llm.engine.ranks is not None
        pid = llm.engine.ranks.pids[-1]
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(EngineError, match=rf"rank 1 \(process {pid}\) ended with SIGKILL"):
            llm.generate(["one", "two"], LONG, use_tqdm=False)
    finally:
        llm.shutdown()


def test_a_rank_that_stops_while_experts_move_is_named(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A choice or a layer comes before every step."""
    model = checkpoint("mixtral", folder / "mixtral")
    llm = LLM(
        model, **SIZE, tensor_parallel_size=2, enable_expert_parallel=True, enable_eplb=True,
        eplb_config={"num_redundant_experts": 1, "step_interval": 1, "window_size": 1},
    )  # fmt: skip
    try:
        llm.generate(["one"], LONG, use_tqdm=False)
        assert facts_of(llm).n_moved > 10
        assert llm.engine.ranks is not None
        (pid,) = llm.engine.ranks.pids
        monkeypatch.setattr(group, "LOST_S", 0.8)
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(EngineError, match=r"rank 1 .* made no progress"):
            llm.generate(["one"], LONG, use_tqdm=False)
    finally:
        llm.shutdown()


@pytest.mark.parametrize("options, message", [
    ({"enable_eplb": True}, "a part of every expert, so that all have the same load: add enable_expert_parallel=True"),
    ({"enable_eplb": True, "enable_expert_parallel": True, "eplb_config": {"num_redundant_experts": 3}},
     "num_redundant_experts = 3 and the 8 experts of a layer are 11, which 2 ranks cannot share equally: give 2 or 4"),
    ({"enable_eplb": True, "enable_expert_parallel": True, "eplb_config": {"num_redundant_experts": 10}},
     "is more than 8: with that each of 2 ranks has all 8 experts already"),
])  # fmt: skip
def test_mistakes_are_named_before_a_rank_is_started(
    options: dict[str, Any], message: str, folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = checkpoint("qwen3_moe", folder / "qwen3_moe")
    monkeypatch.setattr(group.RankGroup, "start", lambda self: pytest.fail("a process was to be started"))
    with pytest.raises(ConfigError, match=message):
        LLM(model, **SIZE, tensor_parallel_size=2, **options)
