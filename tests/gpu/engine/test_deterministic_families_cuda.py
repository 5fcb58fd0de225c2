"""A needle among neighbours on a GPU, of models with latent attention, recurrent layers and gated experts."""

from __future__ import annotations

import json
import pathlib
import random
from typing import Any

import pytest

import quire
from quire import LLM, SamplingParams
from quire.core.errors import ConfigError

SHAPES = pathlib.Path(quire.__file__).parent / "bench" / "shapes"
CASES: dict[str, dict[str, Any]] = {
    "deepseek-v2-lite": {"num_hidden_layers": 3},
    "qwen3-next-80b-a3b": {"num_hidden_layers": 4, "num_experts": 32},
    "mamba2-2.7b": {"num_hidden_layers": 4},
    "lfm2-1.2b": {"num_hidden_layers": 6, "full_attn_idxs": [2, 5]},
}
"""Shape → what is smaller here."""
RNG = random.Random(1)
NEEDLES = [[RNG.randrange(5, 50_000) for _ in range(n)] for n in (130, 2500)]
"""Keys of decode steps are cut every 2,048."""
WISHES: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 0.9, "seed": 7, "top_p": 0.95}]
COMPANIES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "chunks of 48": {"max_num_batched_tokens": 48, "max_num_seqs": 12},
    "preempted": {"num_gpu_blocks_override": 250, "max_num_seqs": 24, "max_num_batched_tokens": 700},
    "kernel by kernel, depth 1, no prefix cache": {
        "enforce_eager": True, "pipeline_depth": 1, "enable_prefix_caching": False,
    },
}  # fmt: skip
Answer = list[tuple[int, list[tuple[int, float]]]]
"""Tokens, each with its log-probability and those of others."""


@pytest.fixture(params=CASES)
def shape(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> str:
    fields = json.loads((SHAPES / request.param / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(fields | CASES[request.param]))
    return str(tmp_path)


def engine(shape: str, **options: Any) -> LLM:
    sizes: dict[str, Any] = {"max_model_len": 3000, "max_num_seqs": 32, "num_gpu_blocks_override": 3000}
    return LLM(shape, load_format="dummy", skip_tokenizer_init=True, device="cuda", **(sizes | options))


def said(llm: LLM, n_others: int, rng: random.Random, **asks: bool) -> list[Answer]:
    """What the needles say to each wish, among so many others that do not ask, at random places."""
    prompts = [[rng.randrange(5, 4000) for _ in range(rng.randint(4, 700))] for _ in range(n_others)]
    wishes = [
        SamplingParams(temperature=1.0, seed=i, max_tokens=rng.randint(3, 60), ignore_eos=True) for i in range(n_others)
    ]
    places: list[int] = []
    for needle in NEEDLES:
        for wish in WISHES:
            at = rng.randint(0, len(prompts))
            places = [one + (one >= at) for one in places] + [at]
            prompts.insert(at, needle)
            wishes.insert(at, SamplingParams(max_tokens=24, ignore_eos=True, logprobs=2, **asks, **wish))
    outputs = llm.generate([{"prompt_token_ids": one} for one in prompts], wishes, use_tqdm=False)
    found = [outputs[at].outputs[0] for at in places]
    rows = [[[(token, row[token].logprob) for token in row] for row in one.logprobs] for one in found]
    return [list(zip(one.token_ids, row, strict=True)) for one, row in zip(found, rows, strict=True)]


def differences(found: list[Answer], first: list[Answer]) -> str:
    """Which needles say something else, and from which token on; empty: none. From the first: the prompt differs."""
    pairs = [list(zip(a, b, strict=True)) for a, b in zip(found, first, strict=True)]
    begin = {i: next((at for at, (x, y) in enumerate(tokens) if x != y), None) for i, tokens in enumerate(pairs)}
    return ", ".join(f"needle {i} from token {at} on" for i, at in begin.items() if at is not None)


def test_the_needle_says_the_same(shape: str) -> None:
    first: list[Answer] = []
    different, n_preemptions = [], 0
    for name, options in COMPANIES.items():
        llm, rng = engine(shape, deterministic=True, **options), random.Random(name)
        for n_others in (0, 20):
            one = said(llm, n_others, rng)
            first = first or one
            if told := differences(one, first):
                different.append(f"{name}, {n_others} others: {told}")
        n_preemptions += llm.stats().preemptions
        llm.shutdown()
    assert not different, "\n".join([f"{len(different)} of {2 * len(COMPANIES)} companies", *different])
    assert n_preemptions, "some company was too large for its pages"


@pytest.mark.parametrize("shape", ["qwen3-next-80b-a3b", "deepseek-v2-lite"], indirect=True)
def test_a_request_may_ask_for_it(shape: str) -> None:
    """Of an engine whose other requests do not; without the wish some bit differs."""
    llm = engine(shape)
    asked = [said(llm, n_others, random.Random(n_others), deterministic=True) for n_others in (0, 20)]
    plain = [said(llm, n_others, random.Random(n_others)) for n_others in (0, 20)]
    llm.shutdown()
    assert asked[0] == asked[1]
    assert plain[0] != plain[1]


@pytest.mark.parametrize("shape", ["deepseek-v2-lite"], indirect=True)
def test_what_has_no_such_kernel_is_refused(shape: str) -> None:
    with pytest.raises(ConfigError, match=r"deterministic = True cannot be promised: x is torch.float32"):
        engine(shape, deterministic=True, dtype="float32")
