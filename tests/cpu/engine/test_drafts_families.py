"""Greedy text of every family's small checkpoint: with drafts the same as without, in float32."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import pytest
import torch
from family_cases import CASES, IDS, RECURRENT, checkpoint_of

from quire import LLM, SamplingParams

PROMPTS = [{"prompt_token_ids": IDS}, {"prompt_token_ids": IDS[:9] * 3}, {"prompt_token_ids": [7]}]
GREEDY = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    n_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(n_threads)


@pytest.mark.parametrize("case", [case for case in CASES if case.partition("-")[0] not in RECURRENT])
def test_the_text_is_the_same(case: str, tmp_path: pathlib.Path) -> None:
    checkpoint_of(case, tmp_path)
    llm = LLM(
        str(tmp_path), skip_tokenizer_init=True, device="cpu", num_threads=1, dtype="float32", max_num_seqs=16,
        speculative_config={"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1},
        num_gpu_blocks_override=60, block_size=8, max_num_batched_tokens=32,
    )  # fmt: skip
    policy = llm.engine.scheduler.live.drafts
    texts = []
    policy.costs = None
    for most in (0, 3):
        policy.most = most
        llm.reset_prefix_cache()
        texts.append([one.outputs[0].token_ids for one in llm.generate(PROMPTS, GREEDY, use_tqdm=False)])
    n_verified = policy.n_verified
    llm.shutdown()
    assert texts[0] == texts[1]
    assert n_verified > 20
