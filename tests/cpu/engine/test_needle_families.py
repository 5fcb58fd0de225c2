"""A needle among neighbours, of models with recurrent layers, and of those with kernels of their own for rows that are
alone: experts with gates and sigmoids, latent attention. Tokens and log-probabilities are compared as bits."""

from __future__ import annotations

import pathlib
import random
from typing import Any

import pytest
from family_cases import RECURRENT, checkpoint_of

from quire.control import snapshots
from quire.core.sampling import SamplingParams
from quire.engine.llm import LLM
from quire.kernels import native

pytestmark = pytest.mark.skipif(native.library() is None, reason="needs the compiled CPU kernels")
CASES = {
    "qwen3_next": "float32",
    "mamba2": "float32",
    "lfm2": "float32",
    "granitemoehybrid": "bfloat16",
    "deepseek_v2": "float32",
    "deepseek_v3": "bfloat16",
    "gpt_oss": "float32",
    "qwen2_moe": "float32",
}
ANYWAY = {"mamba2", "lfm2", "granitemoehybrid"}
"""Those that are so without the wish."""
NEEDLE = [random.Random(1).randrange(1, 250) for _ in range(75)]
WISHES: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 0.9, "seed": 7, "top_p": 0.95}]
OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True, "device": "cpu", "num_threads": 1, "max_model_len": 128, "block_size": 8,
    "max_num_seqs": 12, "num_gpu_blocks_override": 200, "max_num_batched_tokens": 256,
}  # fmt: skip
COMPANIES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "chunks of 16": {"max_num_batched_tokens": 16},
    "preempted, chunks of 50": {"num_gpu_blocks_override": 30, "max_num_batched_tokens": 50},
    "one by one, no prefix cache": {"pipeline_depth": 1, "enable_prefix_caching": False},
}
DRAFTS: dict[str, dict[str, Any]] = {
    "drafts": {"speculative_config": {"method": "ngram", "prompt_lookup_min": 1}, "max_num_batched_tokens": 40}
}
"""Not of models with states."""
Answer = tuple[list[int], list[tuple[int, float]]]


@pytest.fixture(autouse=True)
def near(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "EVERY_TOKENS", 16)


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, pathlib.Path]:
    folder = tmp_path_factory.mktemp(request.param)
    checkpoint_of(request.param, folder)
    return request.param, folder


def said(llm: LLM, n_others: int, rng: random.Random, *, asks: bool) -> list[Answer]:
    """What the needle says to each wish, among so many others that do not ask."""
    prompts = [[rng.randrange(1, 250) for _ in range(rng.randint(4, 80))] for _ in range(n_others)]
    wishes = [
        SamplingParams(temperature=1.0, seed=i, max_tokens=rng.randint(3, 20), ignore_eos=True) for i in range(n_others)
    ]
    places = []
    for wish in WISHES:
        at = rng.randint(0, len(prompts))
        places = [one + (one >= at) for one in places] + [at]
        prompts.insert(at, NEEDLE)
        wishes.insert(at, SamplingParams(max_tokens=14, ignore_eos=True, logprobs=2, deterministic=asks, **wish))
    outputs = llm.generate([{"prompt_token_ids": one} for one in prompts], wishes, use_tqdm=False)
    found = [outputs[at].outputs[0] for at in places]
    return [(one.token_ids, [(token, row[token].logprob) for row in one.logprobs for token in row]) for one in found]


def different(folder: pathlib.Path, dtype: str, *, asks: bool, companies: dict[str, dict[str, Any]]) -> list[str]:
    """Companies in which it says anything else than in the first; cold, then warm."""
    first: list[Answer] = []
    found = []
    n_preemptions = n_hits = 0
    for name, options in companies.items():
        llm, rng = LLM(str(folder), dtype=dtype, **OPTIONS | options), random.Random(name)
        for n_others in (0, 7):
            one = said(llm, n_others, rng, asks=asks)
            first = first or one
            found += [f"{name}, {n_others} others"] * (one != first)
        n_preemptions += llm.stats().preemptions
        n_hits += llm.stats().prefix_hits
        llm.shutdown()
    assert n_preemptions or len(companies) < len(COMPANIES), "some company was too large for its pages"
    assert n_hits, "some company was warm"
    assert first[0] != first[1]
    return found


def test_the_needle_says_the_same(case: tuple[str, pathlib.Path]) -> None:
    name, folder = case
    companies = COMPANIES if name in RECURRENT else COMPANIES | DRAFTS
    assert not different(folder, CASES[name], asks=name not in ANYWAY, companies=companies)


@pytest.mark.parametrize("case", ["qwen3_next"], indirect=True)
def test_without_the_wish_it_does_not(case: tuple[str, pathlib.Path]) -> None:
    companies = {name: COMPANIES[name] for name in ("as it is", "chunks of 16")}
    assert different(case[1], CASES[case[0]], asks=False, companies=companies)


@pytest.mark.parametrize("case", ["qwen3_next"], indirect=True)
def test_a_server_may_ask_for_all(case: tuple[str, pathlib.Path]) -> None:
    """And says what one that was asked says."""
    asked, everywhere = (LLM(str(case[1]), deterministic=one, **OPTIONS) for one in (False, True))
    assert said(asked, 3, random.Random(0), asks=True) == said(everywhere, 0, random.Random(1), asks=False)
    asked.shutdown()
    everywhere.shutdown()
