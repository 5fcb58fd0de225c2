"""What a request gets does not depend on what its neighbours ask for, bit for bit; every token has one as likely."""

from __future__ import annotations

import pathlib
import random
import shutil
from typing import Any

import pytest
import torch
import transformers

from quire.core.outputs import RequestOutput
from quire.core.sampling import SamplingParams
from quire.engine.llm import LLM

WISHES: list[dict[str, Any]] = [
    {"logprobs": 1}, {"logprobs": 20}, {"logprobs": 4,
    "prompt_logprobs": 8}, {"prompt_logprobs": 20}, {"temperature": 0.0},
    {"frequency_penalty": 1.0, "presence_penalty": 0.5, "repetition_penalty": 1.2}, {"min_p": 0.2}, {"top_k": 5,
    "top_p": 0.7},
    {"logit_bias": {5: 3.0}}, {"allowed_token_ids": [5, 6, 7]}, {"n": 3,
    "logprobs": 0}, {"min_tokens": 9}, {"bad_words": ["a"]},
]  # fmt: skip
"""What one can ask for that goes through the sampler; `best_of` is n with logprobs."""


@pytest.fixture(scope="module")
def level_llm(checkpoint: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """An engine in whose every distribution tokens 2i and 2i + 1 are level."""
    folder = tmp_path_factory.mktemp("level") / "model"
    shutil.copytree(checkpoint, folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    with torch.no_grad():
        model.lm_head.weight[1::2] = model.lm_head.weight[::2][: len(model.lm_head.weight[1::2])]
    model.save_pretrained(folder)
    return LLM(str(folder), max_num_seqs=16, max_num_batched_tokens=48, device="cpu", enable_prefix_caching=False)


def said(output: RequestOutput) -> tuple[Any, ...]:
    def values(rows: Any) -> Any:
        return [None if row is None else {token: (one.logprob, one.rank) for token, one in row.items()} for row in rows]

    one = output.outputs[0]
    return one.token_ids, values(one.logprobs), values(output.prompt_logprobs)


def test_neighbours_wishes_change_nothing(level_llm: LLM) -> None:
    source = random.Random(4)
    prompt = [source.randrange(1, 300) for _ in range(30)]
    mine = SamplingParams(temperature=0.9, seed=7, max_tokens=16, logprobs=5, prompt_logprobs=3, ignore_eos=True)
    expected = said(level_llm.generate([prompt], mine, use_tqdm=False)[0])
    for row in expected[1]:
        assert len(set(sorted((value for value, _ in row.values()), reverse=True)[:4])) == 2, "pairs are level"
    for wishes in (*([wish] * 3 for wish in WISHES), WISHES):
        defaults: dict[str, Any] = {"temperature": 0.8, "seed": 3, "max_tokens": 12, "ignore_eos": True}
        others = [SamplingParams(**(defaults | wish)) for wish in wishes]
        prompts = [[source.randrange(1, 300) for _ in range(source.randrange(2, 60))] for _ in others]
        outputs = level_llm.generate([*prompts, prompt], [*others, mine], use_tqdm=False)
        assert said(outputs[-1]) == expected, wishes


@pytest.mark.parametrize("n_top", [1, 3, 5, 20])
def test_level_tokens_are_reported_by_id(level_llm: LLM, n_top: int) -> None:
    """The first entries are the same however many are asked for."""
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=n_top, ignore_eos=True)
    shorter = level_llm.generate([[7, 8, 9]], params, use_tqdm=False)[0].outputs[0]
    params.logprobs = 20
    longer = level_llm.generate([[7, 8, 9]], params, use_tqdm=False)[0].outputs[0]
    assert shorter.token_ids == longer.token_ids and all(token % 2 == 0 for token in longer.token_ids)
    for few, many in zip(shorter.logprobs or [], longer.logprobs or [], strict=True):
        order = sorted(many, key=lambda token: (-many[token].logprob, token))
        assert sorted(few, key=lambda token: (-few[token].logprob, token)) == order[:n_top]
