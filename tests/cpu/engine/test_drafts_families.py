"""Greedy text of every family's small checkpoint: with drafts the same as without, in float32, while sequences are
preempted, cancelled and stopped."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from family_cases import CASES, IDS, RECURRENT, checkpoint_of

from quire import LLM, SamplingParams

PROMPTS = [IDS, IDS[:9] * 3, [7], *(IDS[at:] + IDS[:at] for at in range(5, 35, 5))]
"""Their pages are too few for all of them."""
N_TOKENS, CANCELLED = 32, 4


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    n_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(n_threads)


def texts(llm: LLM, stops: list[int]) -> list[list[int]]:
    """Of all prompts but the one that is cancelled after some tokens. stops: token ids at which the last one ends."""
    greedy, stopped = (
        SamplingParams(temperature=0.0, max_tokens=N_TOKENS, ignore_eos=True, stop_token_ids=ends)
        for ends in ([], stops)
    )
    params = [greedy] * (len(PROMPTS) - 1) + [stopped]
    asked = zip(PROMPTS, params, strict=True)
    streams: list[Any] = [llm.stream({"prompt_token_ids": prompt}, wish) for prompt, wish in asked]
    newest = [next(stream) for stream in streams]  # all have begun
    next(streams[CANCELLED])
    streams[CANCELLED].close()
    parts = [[first, *stream] for first, stream in zip(newest, streams, strict=True)]
    said = [[token for part in some for token in part.outputs[0].token_ids] for some in parts]
    del said[CANCELLED]
    return said


@pytest.mark.parametrize("case", [case for case in CASES if case.partition("-")[0] not in RECURRENT])
def test_the_text_is_the_same(case: str, tmp_path: pathlib.Path) -> None:
    checkpoint_of(case, tmp_path)
    llm = LLM(
        str(tmp_path), skip_tokenizer_init=True, device="cpu", num_threads=1, dtype="float32", max_num_seqs=16,
        speculative_config={"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1},
        num_gpu_blocks_override=40, block_size=8, max_num_batched_tokens=128,
    )  # fmt: skip
    policy = llm.engine.scheduler.live.drafts
    policy.costs = None
    policy.most = 0
    plain = texts(llm, [])
    assert [len(text) for text in plain] == [N_TOKENS] * (len(PROMPTS) - 1)
    stop = plain[-1][N_TOKENS // 2]
    plain[-1] = plain[-1][: plain[-1].index(stop) + 1]
    policy.most = 3
    llm.reset_prefix_cache()
    n_preempted = llm.stats().preemptions
    assert texts(llm, [stop]) == plain
    stats, keeps_all = llm.stats(), llm.engine.scheduler.config.kv.n_full > 0
    llm.shutdown()
    assert stats.draft_tokens > 20 and stats.n_pages_free == stats.n_pages
    assert not keeps_all or stats.preemptions > n_preempted, "windows alone take few pages"
