"""The assembled engine on a GPU: transformers' tokens, the CPU's logprobs, graphs against eager, preemption."""

from __future__ import annotations

import pathlib
import random
import re
from typing import Any

import byte_model
import pytest
import torch

from quire.core.request import Pooling
from quire.core.sampling import SamplingParams
from quire.core.structured import StructuredOutputsParams
from quire.engine.llm import LLM

pytestmark = pytest.mark.gpu
SIZE = {"max_num_seqs": 16, "max_num_batched_tokens": 64, "num_gpu_blocks_override": 129}


def prompts(n: int, longest: int = 120, seed: int = 0) -> list[list[int]]:
    source = random.Random(seed)
    return [[source.randrange(1, 300) for _ in range(source.randrange(1, longest))] for _ in range(n)]


def tokens(llm: LLM, batch: list[list[int]], params: SamplingParams) -> list[list[int]]:
    return [one.outputs[0].token_ids for one in llm.generate(batch, params, use_tqdm=False)]


@pytest.mark.parametrize("eager", [True, False])
def test_greedy_tokens_are_those_of_transformers(checkpoint: pathlib.Path, oracle: Any, eager: bool) -> None:
    llm = LLM(str(checkpoint), device="cuda", enforce_eager=eager, **SIZE)
    batch = prompts(24)
    for prompt, ids in zip(
        batch, tokens(llm, batch, SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)), strict=True
    ):
        given = torch.tensor([prompt])
        expected = oracle.generate(
            given,
            attention_mask=torch.ones_like(given),
            max_new_tokens=64,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert ids == expected[0, len(prompt) :].tolist()
    assert llm.stats().n_pages_free == llm.stats().n_pages


def test_logprobs_equal_those_of_the_cpu_in_bfloat16(checkpoint: pathlib.Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    batch = prompts(6, seed=1)
    rows = {}
    for device in ("cpu", "cuda"):
        llm = LLM(str(checkpoint), device=device, dtype="bfloat16", **SIZE)
        outputs = llm.generate(batch, params, use_tqdm=False)
        rows[device] = [
            row[token].logprob
            for prompt, one in zip(batch, outputs, strict=True)
            for token, row in zip(prompt[1:], (one.prompt_logprobs or [])[1:], strict=True)
            if row is not None
        ]
    difference = (torch.tensor(rows["cpu"]) - torch.tensor(rows["cuda"])).abs()
    # Logits of magnitude up to about 30 in bfloat16 have steps of 0.125; the mean tells a bug from rounding.
    assert difference.mean() < 0.05 and difference.max() < 0.6


def test_sampled_graph_and_eager_tokens_are_equal(checkpoint: pathlib.Path) -> None:
    batch = prompts(40, seed=2)
    params = SamplingParams(temperature=0.9, top_p=0.95, top_k=40, seed=7, max_tokens=48, ignore_eos=True)
    eager = tokens(LLM(str(checkpoint), device="cuda", enforce_eager=True, **SIZE), batch, params)
    assert tokens(LLM(str(checkpoint), device="cuda", **SIZE), batch, params) == eager


def test_preemption_changes_nothing(checkpoint: pathlib.Path) -> None:
    batch = prompts(12, seed=3)
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    roomy = tokens(LLM(str(checkpoint), device="cuda", **SIZE), batch, params)
    tight = LLM(str(checkpoint), device="cuda", max_model_len=256, **{**SIZE, "num_gpu_blocks_override": 24})
    assert tokens(tight, batch, params) == roomy
    assert tight.stats().preemptions > 0


def test_prefix_cache_n_and_seeds(checkpoint: pathlib.Path) -> None:
    llm = LLM(str(checkpoint), device="cuda", **SIZE)
    prompt = list(range(10, 120))
    params = SamplingParams(n=4, temperature=1.0, seed=3, max_tokens=12, ignore_eos=True)
    first, second = (llm.generate([prompt], params, use_tqdm=False)[0] for _ in range(2))
    assert second.num_cached_tokens >= 96
    assert [one.token_ids for one in first.outputs] == [one.token_ids for one in second.outputs]
    assert len({tuple(one.token_ids) for one in first.outputs}) == 4


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("pooling", list(Pooling))
def test_vectors_are_those_of_transformers(
    checkpoint: pathlib.Path, oracle: Any, pooling: Pooling, eager: bool
) -> None:
    """In chunks, beside each other; graphs give the rows from which the vectors are made."""
    llm = LLM(str(checkpoint), device="cuda", enforce_eager=eager, **SIZE)
    batch = [*prompts(12, longest=200, seed=3), [7]]
    for prompt, output in zip(batch, llm.embed(batch, pooling, use_tqdm=False), strict=True):
        with torch.no_grad():
            states = oracle.model(torch.tensor([prompt])).last_hidden_state[0].float()
        expected = states[-1] if pooling is Pooling.LAST else states.mean(0)
        torch.testing.assert_close(torch.tensor(output.pooled), expected, rtol=5e-3, atol=5e-3)
    assert llm.stats().n_pages_free == llm.stats().n_pages


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_masks_hold_in_graphs_as_in_eager_steps(tmp_path: pathlib.Path, temperature: float) -> None:
    """Constrained and free sequences side by side, with a penalty in some, whose steps choose kernel by kernel."""
    model, outputs = str(byte_model.make(tmp_path)), []
    pattern = "[a-z]{4,30}[.]"
    for eager in (True, False):
        llm = LLM(model, load_format="dummy", device="cuda", enforce_eager=eager, **SIZE)
        params = [
            SamplingParams(
                temperature=temperature, max_tokens=40, seed=i, presence_penalty=0.5 if i == 23 else 0.0,
                structured_outputs=None if i % 3 == 0 else StructuredOutputsParams(regex=pattern),
            )
            for i in range(24)
        ]  # fmt: skip
        found = [one.outputs[0] for one in llm.generate(["ab"] * 24, params, use_tqdm=False)]
        assert all(re.fullmatch(pattern, one.text) for i, one in enumerate(found) if i % 3)
        outputs.append([one.token_ids for one in found])
        llm.shutdown()
    assert outputs[0] == outputs[1]
