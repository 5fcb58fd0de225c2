"""`speculative_config` on the demo model: the same answers in fewer steps, whatever a request asks for."""

from __future__ import annotations

from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.core.errors import ConfigError

COPIES = "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n\n" * 4
TALKS = "What is the capital of France, and who wrote its longest book?"
WISHES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "random": {"temperature": 1.0, "seed": 5},
    "top": {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "min_p": 0.02, "seed": 6},
    "penalties": {"temperature": 0.7, "presence_penalty": 0.6, "repetition_penalty": 1.2, "seed": 7},
    "bias": {"temperature": 0.0, "logit_bias": {260: 5.0}, "bad_words": ["add"]},
    "logprobs": {"temperature": 0.0, "logprobs": 3},
    "stop": {"temperature": 0.0, "stop": ["sub("]},
    "several": {"temperature": 1.0, "seed": 9, "n": 3},
    "allowed": {"temperature": 1.0, "seed": 3, "allowed_token_ids": list(range(300, 420))},
}
METHODS: dict[str, dict[str, Any]] = {"ngram": {"method": "ngram"}}


def answers(llm: LLM, **wishes: Any) -> list[Any]:
    params = SamplingParams(max_tokens=70, ignore_eos=True, **wishes)
    return [
        (one.token_ids, one.text, one.finish_reason, one.logprobs)
        for output in llm.generate([COPIES, TALKS], params)
        for one in output.outputs
    ]


@pytest.fixture(scope="module")
def plain() -> Any:
    llm = LLM("")
    yield llm
    llm.shutdown()


@pytest.fixture(scope="module", params=METHODS, ids=str)
def speculative(request: pytest.FixtureRequest) -> Any:
    llm = LLM("", speculative_config=METHODS[request.param])
    yield llm
    llm.shutdown()


@pytest.mark.parametrize("wish", WISHES)
def test_the_answer_is_the_same(plain: LLM, speculative: LLM, wish: str) -> None:
    assert answers(speculative, **WISHES[wish]) == answers(plain, **WISHES[wish])


def test_text_that_copies_takes_fewer_steps(plain: LLM, speculative: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever drafts cost at the moment on this machine."""
    monkeypatch.setattr(speculative.engine.scheduler.live.drafts, "costs", None)
    n_steps = []
    for llm in (plain, speculative):
        before = llm.stats().steps
        llm.generate(COPIES, SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True))
        n_steps.append(llm.stats().steps - before)
    assert n_steps[0] >= 120 and n_steps[1] < n_steps[0] / 2


def test_metrics_under_the_known_names(plain: LLM, speculative: LLM) -> None:
    speculative.generate(COPIES, SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True))
    stats = speculative.stats()
    assert 0 < stats.n_drafts <= stats.draft_tokens and sum(stats.accepted_at) <= stats.draft_tokens
    assert stats.accepted_at == sorted(stats.accepted_at, reverse=True), "a draft counts if those before it do"
    values = {metric.name: metric for metric in speculative.get_metrics()}
    assert values["quire:spec_decode_num_accepted_tokens"].value == sum(stats.accepted_at)
    assert not any("spec_decode" in metric.name for metric in plain.get_metrics())


def test_the_prefix_cache_is_hit_as_often(plain: LLM, speculative: LLM) -> None:
    hits = []
    for llm in (plain, speculative):
        before = llm.stats().prefix_hits
        first = llm.generate(COPIES + "x = 1\n", SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True))
        again = list(first[0].prompt_token_ids) + list(first[0].outputs[0].token_ids)
        llm.generate([{"prompt_token_ids": again}], SamplingParams(temperature=0.0, max_tokens=8))
        hits.append(llm.stats().prefix_hits - before)
    assert hits[0] == hits[1] > 0


def test_another_device_refuses() -> None:
    with pytest.raises(ConfigError, match="works on the CPU only and the device is null"):
        LLM("", device="null", speculative_config={"method": "ngram"})
