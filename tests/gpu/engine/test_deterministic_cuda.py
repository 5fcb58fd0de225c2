"""A needle among neighbours on a GPU: with `deterministic` no bit of its answer depends on them; without, some does."""

from __future__ import annotations

import pathlib
import random
from typing import Any

import pytest

import quire
from quire import LLM, SamplingParams
from quire.core.errors import ConfigError, InvalidParameter

SHAPE = str(pathlib.Path(quire.__file__).parent / "bench" / "shapes" / "qwen3-0.6b")
RNG = random.Random(1)
LENGTHS = (130, 2500, 9000)
"""Prompts; keys of decode steps are cut every 2,048, those of prompts every 8,192."""
FEW = [41, 57, 83, 112]
"""Tokens that each needle ends with, over and over. An answer of them alone is guessed, now right and now wrong."""
NEEDLES = [[*(RNG.randrange(5, 150_000) for _ in range(n - 60)), *RNG.choices(FEW, k=60)] for n in LENGTHS]
WISHES: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 7, "top_p": 0.95, "presence_penalty": 0.3},
    {"temperature": 0.9, "seed": 8, "allowed_token_ids": FEW},
]
COMPANIES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "chunks of 48": {"max_num_batched_tokens": 48, "max_num_seqs": 12},
    "preempted": {"num_gpu_blocks_override": 620, "max_num_seqs": 24, "max_num_batched_tokens": 700},
    "drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}},
    "kernel by kernel, depth 1, no prefix cache": {
        "enforce_eager": True, "pipeline_depth": 1, "enable_prefix_caching": False,
    },
}  # fmt: skip

Answer = tuple[list[int], list[tuple[int, float]]]


def engine(**options: Any) -> LLM:
    sizes: dict[str, Any] = {"max_model_len": 9600, "max_num_seqs": 64, "num_gpu_blocks_override": 4000}
    llm = LLM(SHAPE, load_format="dummy", skip_tokenizer_init=True, device="cuda", **(sizes | options))
    llm.engine.scheduler.live.drafts.costs = None  # as many drafts as there is room for
    return llm


def needle(llm: LLM, prompt: list[int], wish: dict[str, Any], n_others: int, rng: random.Random) -> Answer:
    """What it says among so many others, at a random place."""
    params = SamplingParams(max_tokens=24, ignore_eos=True, logprobs=2, prompt_logprobs=0, **wish)
    prompts = [[rng.randrange(5, 4000) for _ in range(rng.randint(4, 700))] for _ in range(n_others)]
    wishes = [
        SamplingParams(temperature=1.0, seed=i, max_tokens=rng.randint(3, 99), ignore_eos=True) for i in range(n_others)
    ]
    at = rng.randint(0, n_others)
    prompts.insert(at, prompt)
    wishes.insert(at, params)
    request = llm.generate([{"prompt_token_ids": one} for one in prompts], wishes, use_tqdm=False)[at]
    one = request.outputs[0]
    assert request.prompt_logprobs is not None and one.logprobs is not None
    rows = [*request.prompt_logprobs[1:], *one.logprobs]
    return one.token_ids, [(token, row[token].logprob) for row in rows for token in row]


def answers(llm: LLM, name: str) -> dict[tuple[int, int], list[Answer]]:
    rng, found = random.Random(name), dict[tuple[int, int], list[Answer]]()
    for n_others in (0, 7, 40):
        for length, prompt in enumerate(NEEDLES):
            for number, wish in enumerate(WISHES):
                found.setdefault((length, number), []).append(needle(llm, prompt, wish, n_others, rng))
    return found


def test_the_needle_says_the_same_on_cuda() -> None:
    first: dict[tuple[int, int], Answer] = {}
    n_preemptions = n_drafts = n_right = 0
    different = []
    for name, options in COMPANIES.items():
        llm = engine(deterministic=True, **options)
        for key, said in answers(llm, name).items():
            different += [(name, *key, i) for i, one in enumerate(said) if one != first.setdefault(key, said[0])]
        n_preemptions += llm.stats().preemptions
        n_drafts += llm.stats().draft_tokens
        n_right += llm.stats().accepted_tokens
        llm.shutdown()
    assert not different
    assert n_preemptions, "some company was too large for its pages"
    assert 0 < n_right < n_drafts, "some company verified drafts, right ones and wrong ones"


def test_a_request_may_ask_for_it() -> None:
    """Of an engine whose other requests do not: it says what it says where all ask; the others' answers differ."""
    asked, everywhere = engine(), engine(deterministic=True)
    wishes = [wish | {"deterministic": True} for wish in WISHES]
    different = []
    for length, prompt in enumerate(NEEDLES):
        for number, wish in enumerate(wishes):
            alone = needle(everywhere, prompt, wish, 0, random.Random(0))
            for n_others in (0, 7, 40):
                said = needle(asked, prompt, wish, n_others, random.Random(n_others))
                different += [(length, number, n_others)] * (said != alone)
    found = answers(asked, "as it is")
    asked.shutdown()
    everywhere.shutdown()
    assert not different
    assert any(one != said[0] for said in found.values() for one in said)


def test_what_has_no_such_kernel_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"deterministic = True cannot be promised: x is torch.float32"):
        engine(deterministic=True, dtype="float32")
    llm = engine(dtype="float32")
    with pytest.raises(InvalidParameter, match=r"deterministic.*x is torch.float32"):
        llm.generate([{"prompt_token_ids": [1, 2]}], SamplingParams(deterministic=True, temperature=0.0))
    llm.shutdown()
