"""Random traffic with drafts on a GPU: cancelled at any moment, preempted, ended by stop strings; no page is left."""

from __future__ import annotations

import contextlib
import pathlib
import random
from typing import Any

import pytest
import torch
from speculative_cases import COPIES, METHODS, TALKS, TREES
from traffic.checkpoint import WIDE, write_checkpoint
from traffic.soak import CUDA, Soak

from quire import LLM, RequestOutput, SamplingParams

pytestmark = pytest.mark.gpu
FEW_PAGES: dict[str, Any] = {
    "device": "cuda", "max_num_seqs": 24, "max_model_len": 384, "max_num_batched_tokens": 128,
    "num_gpu_blocks_override": 44,
}  # fmt: skip


@pytest.mark.parametrize("config", [METHODS["ngram"], METHODS["suffix"], TREES["suffix tree"]], ids=str)
def test_no_wrong_token_and_nothing_leaked(tmp_path: pathlib.Path, config: dict[str, Any]) -> None:
    """Judged by transformers; a sequence that its client ends is what a stop string does."""
    model = write_checkpoint(tmp_path, "Llama", WIDE, torch.float32)
    soak = Soak(tmp_path, model, seed=3, **CUDA | {"speculative_config": config | {"num_speculative_tokens": 5}})
    drafts = soak.core.scheduler.live.drafts
    drafts.costs = None  # as many as there is room for
    found = soak.run(n_steps=400)
    assert not found.faults
    assert drafts.n_verified > 500 and sum(drafts.n_right) > 20
    assert found.cancels > 5 and found.preemptions > 0 and found.prefix_hits > 0
    assert found.verdicts.n_tokens == found.tokens > 1000


def whole(parts: list[RequestOutput]) -> tuple[list[int], str, str | None]:
    """Tokens, text and end of an answer that came in parts."""
    pieces = [part.outputs[0] for part in parts]
    token_ids = [token for one in pieces for token in one.token_ids]
    return token_ids, "".join(one.text for one in pieces), pieces[-1].finish_reason


@pytest.mark.parametrize("name", ["draft_model", "eagle3", "mtp", "eagle3 tree"])
def test_stop_strings_and_clients_that_leave(name: str) -> None:
    """Answers that are read to the end are those without drafts."""
    drafting = LLM("", dtype="float32", speculative_config=(METHODS | TREES)[name], **FEW_PAGES)
    drafting.engine.scheduler.live.drafts.costs = None
    plain = LLM("", dtype="float32", **FEW_PAGES)
    rng, stops = random.Random(0), [[], ["return"], ["def", "the"], [" a"]]
    asked = [
        (
            (COPIES, TALKS)[i % 2][rng.randrange(20) :],
            SamplingParams(
                temperature=float(i % 4 < 2), seed=i, stop=rng.choice(stops), max_tokens=90, ignore_eos=True
            ),
        )
        for i in range(48)
    ]
    said = []
    for llm in (plain, drafting):
        streams = [llm.stream(*one) for one in asked]
        newest = [next(stream) for stream in streams]
        leaves = {i: rng.randrange(1, 6) for i in range(0, len(asked), 3)}
        for i, n_read in leaves.items():
            for _ in range(n_read):
                with contextlib.suppress(StopIteration):
                    next(streams[i])
            streams[i].close()
        said.append([whole([newest[i], *stream]) for i, stream in enumerate(streams) if i not in leaves])
        stats = llm.stats()
        assert stats.n_pages_free == stats.n_pages and llm.reset_prefix_cache()
        assert stats.preemptions > 0
    assert said[0] == said[1] and {"stop", "length"} == {reason for *_, reason in said[0]}
    assert drafting.stats().accepted_tokens > 50
    plain.shutdown()
    drafting.shutdown()
