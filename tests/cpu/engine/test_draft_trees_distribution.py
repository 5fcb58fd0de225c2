"""Tokens with drafts are distributed as those without: a χ² test over few tokens, other seeds on either side."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from speculative_cases import METHODS, TALKS, TREES

from quire import LLM, SamplingParams
from quire.compute.runner.lengths import SlotLengths

pytestmark = pytest.mark.usefixtures("timed_briefly")

N = 400


def worst(freedom: int) -> float:
    """χ² that chance exceeds once in a thousand times (Wilson and Hilferty 1931)."""
    return float(freedom * (1 - 2 / (9 * freedom) + 3.09 * (2 / (9 * freedom)) ** 0.5) ** 3)


def counts(llm: LLM, first_seed: int) -> tuple[Counter[int], Counter[tuple[int, ...]]]:
    """Of the third token, and of pairs of the second and third by quarters of the ids."""
    params = [
        SamplingParams(temperature=1.5, top_k=8, seed=first_seed + i, max_tokens=4, ignore_eos=True) for i in range(N)
    ]
    said = [one.outputs[0].token_ids for one in llm.generate([TALKS] * N, params, use_tqdm=False)]
    return Counter(one[2] for one in said), Counter((one[1] % 4, one[2] % 4) for one in said)


def chi_squared(one: Counter[Any], other: Counter[Any]) -> tuple[float, int]:
    """Of two samples of N, and its degrees of freedom."""
    cells = [cell for cell in one.keys() | other.keys() if one[cell] + other[cell] >= 10]
    return sum((one[cell] - other[cell]) ** 2 / (one[cell] + other[cell]) for cell in cells), len(cells) - 1


@pytest.fixture(scope="module")
def plain() -> Any:
    llm = LLM("")
    yield counts(llm, 10_000)
    llm.shutdown()


@pytest.mark.parametrize("name", ["draft_model", "eagle3", "mtp", "suffix", *TREES])
def test_the_distribution_is_that_without(plain: Any, name: str) -> None:
    llm = LLM("", max_num_seqs=1, speculative_config=(METHODS | TREES)[name])
    llm.engine.scheduler.live.drafts.costs = None
    found = counts(llm, 0)
    stats = llm.stats()
    llm.shutdown()
    assert stats.draft_tokens > N and stats.accepted_tokens > N // 10
    for one, other in zip(found, plain, strict=True):
        value, freedom = chi_squared(one, other)
        assert value < worst(freedom), name


def test_a_draft_that_always_counts_is_seen(plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SlotLengths, "_counts", lambda self, draft, token: True)
    llm = LLM("", max_num_seqs=1, speculative_config=TREES["eagle3 tree"])
    llm.engine.scheduler.live.drafts.costs = None
    found = counts(llm, 0)
    llm.shutdown()
    assert any(chi_squared(one, other)[0] > 60 for one, other in zip(found, plain, strict=True))
