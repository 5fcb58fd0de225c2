"""`kv_cache_dtype` fp8 and int8 in the engine on a GPU: near to exact keys, the same with graphs as without, twice the
pages; what is refused."""

from __future__ import annotations

import pathlib
import random
from typing import Any

import numpy as np
import pytest

from quire.core.errors import ConfigError
from quire.core.sampling import SamplingParams
from quire.engine.llm import LLM

pytestmark = pytest.mark.gpu
SIZE = {"max_num_seqs": 16, "max_num_batched_tokens": 64, "device": "cuda", "dtype": "bfloat16"}
PAGES = {"num_gpu_blocks_override": 129}


def prompts(n: int, longest: int, seed: int = 0) -> list[list[int]]:
    source = random.Random(seed)
    return [[source.randrange(1, 300) for _ in range(source.randrange(longest // 2, longest))] for _ in range(n)]


def engine(checkpoint: pathlib.Path, **options: Any) -> LLM:
    return LLM(str(checkpoint), **{**SIZE, "kv_cache_dtype": "fp8", **options})


def logprobs(llm: LLM) -> np.ndarray:
    outputs = llm.generate(
        prompts(4, 120), SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0), use_tqdm=False
    )
    return np.array([next(iter(place.values())).logprob for one in outputs for place in one.prompt_logprobs[1:]])


def tokens(llm: LLM, batch: list[list[int]]) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    return [list(one.outputs[0].token_ids) for one in llm.generate(batch, params, use_tqdm=False)]


@pytest.mark.parametrize(("kv_dtype", "least", "most"), [("fp8", 0.02, 0.4), ("int8", 1e-4, 0.1)])
def test_near_to_exact_keys_and_graphs_change_nothing(
    checkpoint: pathlib.Path, kv_dtype: str, least: float, most: float
) -> None:
    found, text = {}, {}
    for name, options in {
        "exact": {"kv_cache_dtype": "auto"}, "eager": {"enforce_eager": True}, "graphs": {},
    }.items():  # fmt: skip
        llm = engine(checkpoint, **PAGES, **{"kv_cache_dtype": kv_dtype, **options})
        found[name] = logprobs(llm)
        text[name] = [tokens(llm, [one])[0] for one in prompts(4, 60, seed=1)]
        llm.shutdown()
    apart = np.square(found["exact"] - found["graphs"]).mean() ** 0.5 / found["exact"].std()
    assert least < apart < most
    assert text["eager"] == text["graphs"]


def test_a_pool_of_as_many_bytes_has_twice_the_pages(checkpoint: pathlib.Path) -> None:
    pages = []
    for kv_dtype in ("auto", "fp8"):
        llm = engine(checkpoint, kv_cache_dtype=kv_dtype, kv_cache_memory_bytes="8MiB", enforce_eager=True)
        pages.append(llm.stats().n_pages)
        llm.shutdown()
    assert abs(pages[1] + 1 - 2 * (pages[0] + 1)) <= 1


def test_prefixes_preemption_and_drafts(checkpoint: pathlib.Path) -> None:
    """Everything runs, and leaves no page behind."""
    draft = {"method": "ngram", "num_speculative_tokens": 3}
    for options in ({"num_gpu_blocks_override": 33}, {**PAGES, "speculative_config": draft}):
        llm = engine(checkpoint, **options)
        batch = prompts(24, 100)
        assert all(len(one) == 32 for one in tokens(llm, batch + batch))
        assert llm.stats().n_pages_free == llm.stats().n_pages
        llm.shutdown()


def test_what_is_refused(checkpoint: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match="deterministic = True cannot be promised: keys and values are"):
        engine(checkpoint, deterministic=True, **PAGES)
