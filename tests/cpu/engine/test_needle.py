"""A needle among neighbours: a request's tokens and log-probabilities do not depend on what else runs, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from speculative_cases import METHODS

from quire import LLM, SamplingParams
from quire.compute.platform import CpuPlatform, platform_of
from quire.compute.runner.tail import Tail
from quire.compute.sample.sampler import Sampled
from quire.compute.schemes import choice
from quire.compute.worker import Worker
from quire.config.engine import EngineConfig
from quire.core.errors import ConfigError, InvalidParameter
from quire.engine import workers
from quire.kernels import native, selector
from quire.kernels.attention import selection

NEEDLE = [random.Random(1).randrange(5, 4000) for _ in range(130)]
WISHES: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 7, "top_p": 0.95, "presence_penalty": 0.3},
]
TYPES: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "float32": {"dtype": "float32"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "int8-keys": {"kv_cache_dtype": "int8"},
}
COMPANIES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "chunks of 16": {"max_num_batched_tokens": 16, "max_num_seqs": 12},
    "chunks of 100": {"max_num_batched_tokens": 100},
    "depth 1, no prefix cache": {"pipeline_depth": 1, "enable_prefix_caching": False},
    "preempted": {"num_gpu_blocks_override": 32, "max_model_len": 256},
    "drafts": {"speculative_config": {"method": "ngram", "prompt_lookup_min": 1}},
    "a head's drafts": {"speculative_config": METHODS["eagle3"]},
    "small pages": {"block_size": 4},
}

Answer = tuple[list[int], list[tuple[int, float]]]


def needles(llm: LLM, asked: list[dict[str, Any]], n_others: int, rng: random.Random) -> list[Answer]:
    """What it says to each of these wishes among so many others, at random places."""
    prompts = [[rng.randrange(5, 4000) for _ in range(rng.randint(4, 110))] for _ in range(n_others)]
    wishes = [
        SamplingParams(temperature=1.0, seed=i, max_tokens=rng.randint(3, 20), ignore_eos=True) for i in range(n_others)
    ]
    own = [
        SamplingParams(max_tokens=16, ignore_eos=True, logprobs=2, **{"deterministic": True} | wish) for wish in asked
    ]
    for params in own:
        at = rng.randint(0, len(prompts))
        prompts.insert(at, NEEDLE)
        wishes.insert(at, params)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], wishes)
    found = [outputs[next(i for i, one in enumerate(wishes) if one is params)].outputs[0] for params in own]
    return [(one.token_ids, [(token, row[token].logprob) for row in one.logprobs for token in row]) for one in found]


def answers(llm: LLM, company: random.Random, counts: tuple[int, ...]) -> Iterator[tuple[int, Answer]]:
    """(number of the wish, what is said): to each wish alone, then to all of them among others."""
    for number, wish in enumerate(WISHES):
        yield number, *needles(llm, [wish], 0, company)
    for n_others in counts:
        yield from enumerate(needles(llm, WISHES, n_others, company))


@pytest.mark.parametrize("kind", TYPES)
def test_the_needle_says_the_same(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Worker, "draft_costs", lambda self: None)  # as many drafts as there is room for
    first: dict[int, Answer] = {}
    n_preemptions = n_drafts = 0
    for name, options in COMPANIES.items():
        llm = LLM("", **TYPES[kind], **options)
        for number, answer in answers(llm, random.Random(name), (2, 9)):
            assert answer == first.setdefault(number, answer), name
        n_preemptions += llm.stats().preemptions
        n_drafts += llm.stats().draft_tokens
        llm.shutdown()
    assert n_preemptions, "some company was too large for its pages"
    assert n_drafts > 200, "some company verified drafts"
    assert len(first) == len(WISHES) and first[0] != first[1]


def test_a_choice_that_depends_on_the_batch_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the last bit of one logit says how many rows there are."""

    def sample(self: Tail, step: Any, logits: torch.Tensor, bits: Any) -> Sampled:
        if len(logits) > 1:
            logits[:, :4000] *= 1 + 1e-6
        return real(self, step, logits, bits)

    real = Tail._sample
    monkeypatch.setattr(Tail, "_sample", sample)
    llm = LLM("")
    first: dict[int, Answer] = {}
    found = [answer != first.setdefault(number, answer) for number, answer in answers(llm, random.Random(3), (9,))]
    llm.shutdown()
    assert any(found)


@pytest.fixture
def new_choices() -> Iterator[None]:
    """Kernels are chosen anew, in the test and behind it."""
    caches = selector.candidates, selection._choose
    for one in caches:
        one.cache_clear()
    yield
    for one in caches:
        one.cache_clear()


@pytest.mark.usefixtures("new_choices")
def test_sums_of_torch_without_onednn_depend_on_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why a CPU without the native kernels promises nothing: `F.linear` in float32."""
    monkeypatch.setattr(native, "library", lambda: None)
    monkeypatch.setattr(choice, "can_reorder", lambda device_type, dtype: False)
    llm = LLM("", dtype="float32")
    wish = {"temperature": 0.0, "deterministic": False}
    alone, *others = [needles(llm, [wish], n, random.Random(n)) for n in (0, 2, 9)]
    llm.shutdown()
    assert all(one != alone for one in others)


def test_a_device_that_cannot_promise_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a CPU without the native kernels; the engine goes on."""
    reason = "sums of torch depend on the batch"
    with monkeypatch.context() as patched:
        patched.setattr(native, "library", lambda: None)
        with pytest.raises(ConfigError, match=f"deterministic = True cannot be promised: {reason}"):
            LLM("", deterministic=True)

    def platform(config: EngineConfig, rank: int) -> CpuPlatform:
        found = platform_of(config)
        assert isinstance(found, CpuPlatform)
        found.no_determinism = reason
        return found

    monkeypatch.setattr(workers, "platform_of", platform)
    llm = LLM("")
    with pytest.raises(InvalidParameter, match=r"deterministic.*sums of torch depend on the batch"):
        llm.generate("One", SamplingParams(deterministic=True))
    assert llm.generate("One", SamplingParams(max_tokens=2))[0].outputs[0].token_ids
    llm.shutdown()


def test_what_is_drawn_needs_a_seed() -> None:
    llm = LLM("", deterministic=True)
    with pytest.raises(InvalidParameter, match="seed"):
        llm.generate("One", SamplingParams(deterministic=True, temperature=0.5))
    llm.generate("One", SamplingParams(deterministic=True, temperature=0.0, max_tokens=2))
    llm.shutdown()
