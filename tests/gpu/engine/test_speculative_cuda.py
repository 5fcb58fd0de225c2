"""Drafts on a GPU, in captured steps and kernel by kernel: in float32 the tokens are those without."""

from __future__ import annotations

from typing import Any

import pytest
from speculative_cases import COPIES, METHODS, TREES, WISHES, answers

from quire import LLM, SamplingParams

pytestmark = pytest.mark.gpu
SIZE: dict[str, Any] = {
    "device": "cuda", "dtype": "float32", "max_num_seqs": 16, "max_model_len": 512, "max_num_batched_tokens": 256,
    "num_gpu_blocks_override": 400,
}  # fmt: skip


@pytest.mark.parametrize("eager", [False, True], ids=["captured", "eager"])
@pytest.mark.parametrize("method", [*METHODS, *TREES])
def test_the_answer_is_the_same(method: str, eager: bool) -> None:
    plain = LLM("", enforce_eager=eager, **SIZE)
    expected = {wish: answers(plain, **options) for wish, options in WISHES.items()}
    plain.shutdown()
    llm = LLM("", enforce_eager=eager, speculative_config=(METHODS | TREES)[method], **SIZE)
    llm.engine.scheduler.live.drafts.costs = None
    for wish, options in WISHES.items():
        found = answers(llm, **options)
        if "logprobs" in options:
            found, wanted = ([one[:3] for one in some] for some in (found, expected[wish]))
            assert found == wanted
        else:
            assert found == expected[wish], wish
    stats = llm.stats()
    llm.shutdown()
    assert stats.accepted_tokens > 50 and stats.n_pages_free == stats.n_pages


def test_text_that_copies_takes_fewer_steps_and_pages_come_back() -> None:
    """More sequences than run at once, too few pages for all of these: some are preempted between drafts."""
    params = SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True)
    prompts = [COPIES[i:] for i in range(0, 60, 2)]
    n_steps, texts = [], []
    for config in (None, {"method": "ngram"}):
        llm = LLM("", speculative_config=config, **SIZE | {"num_gpu_blocks_override": 90})
        llm.engine.scheduler.live.drafts.costs = None
        texts.append([one.outputs[0].text for one in llm.generate(prompts, params, use_tqdm=False)])
        stats = llm.stats()
        n_steps.append(stats.steps)
        llm.shutdown()
        assert stats.preemptions > 0 and stats.n_pages_free == stats.n_pages
    assert texts[0] == texts[1]
    assert n_steps[1] < n_steps[0]


def test_costs_are_measured_at_the_start() -> None:
    llm = LLM("", speculative_config={"method": "ngram"}, device="cuda", num_gpu_blocks_override=2000)
    costs = llm.engine.scheduler.live.drafts.costs
    llm.shutdown()
    assert costs is not None and costs.rows[-1] >= 256 and min(costs.step_s) > 0 and costs.guess_s > 0
