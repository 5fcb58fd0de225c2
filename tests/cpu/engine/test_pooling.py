"""Vectors of prompts against transformers: both poolings, chunks, prefixes from the cache, neighbours, faults."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
from test_llm import prompts

from quire.core.errors import ContextLengthExceeded, InvalidParameter
from quire.core.request import Pooling, pooling_params
from quire.core.sampling import SamplingParams
from quire.engine.llm import LLM


def reference(oracle: transformers.LlamaForCausalLM, prompt: list[int], pooling: Pooling) -> np.ndarray:
    with torch.no_grad():
        states = oracle.model(torch.tensor([prompt])).last_hidden_state[0].float()
    return (states[-1] if pooling is Pooling.LAST else states.mean(0)).numpy()


@pytest.mark.parametrize("pooling", list(Pooling))
def test_vectors_are_those_of_transformers(llm: LLM, oracle: transformers.LlamaForCausalLM, pooling: Pooling) -> None:
    batch = [*prompts(12, longest=200, seed=3), [7]]
    for _ in range(2):  # the second time prefixes are cached
        for prompt, output in zip(batch, llm.embed(batch, pooling, use_tqdm=False), strict=True):
            assert output.finished
            expected = reference(oracle, prompt, pooling)
            np.testing.assert_allclose(output.pooled, expected, rtol=2e-3, atol=2e-3)
            assert pooling is Pooling.LAST or output.num_cached_tokens == 0


def test_neighbours_are_not_touched(llm: LLM) -> None:
    batch = prompts(6, seed=4)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    expected = [one.outputs[0].token_ids for one in llm.generate(batch, params, use_tqdm=False)]
    streams = [llm.stream(prompt, params) for prompt in batch]
    said = [list(next(stream).outputs[0].token_ids) for stream in streams]
    llm.embed(prompts(8, longest=150, seed=5), Pooling.MEAN, use_tqdm=False)
    for tokens, stream in zip(said, streams, strict=True):
        for output in stream:
            tokens += output.outputs[0].token_ids
    assert said == expected


def test_what_cannot_be_asked_for(llm: LLM) -> None:
    with pytest.raises(InvalidParameter):
        llm.embed([[]], use_tqdm=False)
    with pytest.raises(ContextLengthExceeded):
        llm.embed([[1] * 100_000], use_tqdm=False)
    with pytest.raises(InvalidParameter, match="pooling"):
        llm._input_processor.request([1], SamplingParams(n=2, max_tokens=1), pooling=Pooling.LAST)
    assert pooling_params().max_tokens == 1
