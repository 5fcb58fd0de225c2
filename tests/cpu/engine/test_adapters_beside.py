"""Adapters beside drafts, which are the model's own, and beside weights in codes."""

from __future__ import annotations

import pathlib

import pytest
import torch
import transformers
from adapter_case import OPTIONS, check_against, merged, write_adapter
from family_cases import IDS, random_checkpoint

from quire import LLM, LoRARequest, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=16, logprobs=0, prompt_logprobs=0, detokenize=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tmp_path_factory.mktemp("beside")


@pytest.fixture(scope="module")
def oracle(folder: pathlib.Path) -> transformers.PreTrainedModel:
    made = random_checkpoint(folder / "model", "Llama")
    write_adapter(folder / "a", made, size=0.15)
    return made


def test_drafts_without_the_adapter_change_no_token(folder: pathlib.Path, oracle: transformers.PreTrainedModel) -> None:
    """The draft is the model itself: nearly all of its drafts hold without the adapter, and few with it."""
    draft = {"method": "draft_model", "model": str(folder / "model"), "num_speculative_tokens": 3}
    llm = LLM(str(folder / "model"), **OPTIONS, max_model_len=64, speculative_config=draft)
    counts, request = [], LoRARequest("a", 1, str(folder / "a"))
    check_against(llm, oracle, None, IDS, GREEDY)
    counts.append(llm.stats())
    with merged(oracle, folder / "a") as model:
        check_against(llm, model, request, IDS, GREEDY)
    counts.append(llm.stats())
    llm.shutdown()
    assert 0 < counts[0].draft_tokens < counts[1].draft_tokens, "both were drafted for"


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_weights_in_codes_are_adapted(
    quantization: str, folder: pathlib.Path, oracle: transformers.PreTrainedModel
) -> None:
    """What the adapter changes is there; the codes' own error is smaller, and the adapter is not rounded."""
    llm = LLM(str(folder / "model"), **OPTIONS, max_model_len=64, quantization=quantization)
    requests = [None, LoRARequest("a", 1, str(folder / "a"))]
    outputs = llm.generate([{"prompt_token_ids": IDS}] * 2, GREEDY, use_tqdm=False, lora_request=requests)
    llm.shutdown()
    found = [
        torch.tensor([line[token].logprob for line, token in zip(one.prompt_logprobs[1:], IDS[1:], strict=True)])
        for one in outputs
    ]
    plain = expected(oracle)
    with merged(oracle, folder / "a") as model:
        adapted = expected(model)
    moved = (adapted - plain).norm()
    for ours, theirs in zip(found, (plain, adapted), strict=True):
        assert (ours - theirs).norm() < LIMITS[quantization] * moved


LIMITS = {"int8": 0.1, "int4": 0.5}
"""Of the norm of what the adapter changes."""


def expected(oracle: transformers.PreTrainedModel) -> torch.Tensor:
    """Log-probabilities of the prompt."""
    with torch.no_grad():
        logprobs = oracle(torch.tensor([IDS])).logits[0].log_softmax(-1)
    return logprobs[:-1].gather(1, torch.tensor(IDS[1:])[:, None])[:, 0]
