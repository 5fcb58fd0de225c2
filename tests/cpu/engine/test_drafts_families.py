"""Greedy text of every family's small checkpoint: with drafts the same as without, in float32, while sequences are
preempted, cancelled and stopped by a token and by a string."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
import tokenizers
import torch
from family_cases import CASES, IDS, RECURRENT, TINY, checkpoint_of

from quire import LLM, SamplingParams

pytestmark = pytest.mark.usefixtures("timed_briefly")

PROMPTS = [IDS, IDS[:9] * 3, [7], *(IDS[at:] + IDS[:at] for at in range(5, 35, 5))]
"""Their pages are too few for all of them."""
CANCELLED, STOPPED_BY_STRING, STOPPED_BY_ID = 4, -2, -1
"""Numbers of prompts. The second one's answer is of a few tokens: some drafts are right and go on behind the string."""
N_TOKENS = 32
VOCABULARY = {chr(0x4E00 + i): i for i in range(TINY["vocab_size"])}
"""A character for each token."""

Said = tuple[list[int], str]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    n_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(n_threads)


def make_tokenizer(folder: pathlib.Path) -> None:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=VOCABULARY, merges=[]))
    tokenizer.decoder = tokenizers.decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))


def answers(llm: LLM, ends: dict[int, dict[str, Any]]) -> list[Said]:
    """Of all prompts but the one that is cancelled after some tokens. ends: number of a prompt → what ends its
    answer."""
    wishes: list[dict[str, Any]] = [{} for _ in PROMPTS]
    wishes[STOPPED_BY_STRING] = {"allowed_token_ids": IDS[:3]}
    for number, one in ends.items():
        wishes[number] |= one
    streams: list[Any] = [
        llm.stream(
            {"prompt_token_ids": prompt},
            SamplingParams(temperature=0.0, max_tokens=N_TOKENS, ignore_eos=True, **wish),
        )
        for prompt, wish in zip(PROMPTS, wishes, strict=True)
    ]
    newest = [next(stream) for stream in streams]  # all have begun
    next(streams[CANCELLED])
    streams[CANCELLED].close()
    parts = [[part.outputs[0] for part in [first, *stream]] for first, stream in zip(newest, streams, strict=True)]
    del parts[CANCELLED]
    return [([i for part in some for i in part.token_ids], "".join(part.text for part in some)) for some in parts]


def ended(plain: list[Said]) -> tuple[dict[int, dict[str, Any]], list[Said]]:
    """What ends two of the answers about half-way, and all of them then."""
    ids, text = plain[STOPPED_BY_STRING]
    string = text[4 : N_TOKENS // 2 + 1]
    at = text.index(string)
    by_string = ids[: at + len(string)], text[:at]
    ids, text = plain[STOPPED_BY_ID]
    token = ids[N_TOKENS // 2]
    by_id = ids[: ids.index(token) + 1], text[: ids.index(token)]
    ends: dict[int, dict[str, Any]] = {
        STOPPED_BY_STRING: {"stop": [string]}, STOPPED_BY_ID: {"stop_token_ids": [token]},
    }  # fmt: skip
    return ends, [*plain[:-2], by_string, by_id]


@pytest.mark.parametrize("case", [case for case in CASES if case.partition("-")[0] not in RECURRENT])
def test_the_text_is_the_same(case: str, tmp_path: pathlib.Path) -> None:
    checkpoint_of(case, tmp_path)
    make_tokenizer(tmp_path)
    llm = LLM(
        str(tmp_path), device="cpu", num_threads=1, dtype="float32", max_num_seqs=16,
        speculative_config={"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1},
        num_gpu_blocks_override=40, block_size=8, max_num_batched_tokens=128,
    )  # fmt: skip
    policy = llm.engine.scheduler.live.drafts
    policy.costs = None
    policy.most = 0
    plain = answers(llm, {})
    assert [len(ids) for ids, _ in plain] == [N_TOKENS] * (len(PROMPTS) - 1)
    ends, expected = ended(plain)
    policy.most = 3
    llm.reset_prefix_cache()
    n_preempted = llm.stats().preemptions
    assert answers(llm, ends) == expected
    stats, keeps_all = llm.stats(), llm.engine.scheduler.config.kv.n_full > 0
    llm.shutdown()
    assert stats.draft_tokens > 20 and stats.n_pages_free == stats.n_pages
    assert stats.accepted_tokens > 3, "some drafts were right"
    assert not keeps_all or stats.preemptions > n_preempted, "windows alone take few pages"
