"""Requests of which some leave while others verify drafts, in few pages, on any device."""

from __future__ import annotations

import contextlib
import random
from typing import Any

from speculative_cases import COPIES, METHODS, TALKS, TREES

from quire import LLM, RequestOutput, SamplingParams


def whole(parts: list[RequestOutput]) -> tuple[list[int], str, str | None]:
    """Tokens, text and end of an answer that came in parts."""
    pieces = [part.outputs[0] for part in parts]
    token_ids = [token for one in pieces for token in one.token_ids]
    return token_ids, "".join(one.text for one in pieces), pieces[-1].finish_reason


def check_those_that_stay(name: str, n_requests: int, **options: Any) -> None:
    """Answers that are read to the end are those without drafts, some ended by stop strings, some preempted; every
    third client leaves. name: of the drafter."""
    drafting = LLM("", dtype="float32", speculative_config=(METHODS | TREES)[name], **options)
    drafting.engine.scheduler.live.drafts.costs = None
    plain = LLM("", dtype="float32", **options)
    rng, stops = random.Random(0), [[], ["return"], ["def", "the"], [" a"]]
    asked = [
        (
            (COPIES, TALKS)[i % 2][rng.randrange(20) :],
            SamplingParams(
                temperature=float(i % 4 < 2), seed=i, stop=rng.choice(stops), max_tokens=90, ignore_eos=True
            ),
        )
        for i in range(n_requests)
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
