"""Chains of guesses in one native call against a step for each place: the same tokens, wherever sequences end."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from speculative_cases import COPIES, DRAFT, TALKS

from quire import LLM, SamplingParams
from quire.compute.draft.drafter import DraftContext
from quire.compute.draft.model import ModelDrafter
from quire.compute.forward.fused import FusedForward
from quire.core.plan import Spans

Guesses = list[list[int]]


@pytest.fixture
def pairs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Guesses, Guesses]]:
    """What a draft model guesses from now on in one call, and what it guesses then step by step."""
    found: list[tuple[Guesses, Guesses]] = []
    real = ModelDrafter.guess

    def both(self: Any, contexts: Sequence[DraftContext]) -> Guesses:
        native, n_read, guessed = self._native, self._n_read.copy(), copy.deepcopy(self._guessed)
        said = real(self, contexts)
        self._native, self._n_read, self._guessed = None, n_read, guessed
        found.append((said, real(self, contexts)))
        self._native = native
        return said

    monkeypatch.setattr(ModelDrafter, "guess", both)
    return found


def talk(most: int) -> None:
    """Six sequences that end apart, over the ends of pages, each with another number of drafts in each step."""
    llm = LLM("", speculative_config={"model": str(DRAFT), "num_speculative_tokens": most}, block_size=16)
    rng = random.Random(3)
    policy: Any = llm.engine.scheduler.live.drafts
    policy.choose = lambda seqs, n_rows, n_free, step: [rng.choice([0, 1, 3, most]) for _ in seqs]
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (9, 20, 33, 34, 35, 50)]
    llm.generate([COPIES[: 90 + 7 * i] if i % 2 else TALKS for i in range(6)], params)
    llm.shutdown()


def test_one_call_guesses_what_steps_do(pairs: list[tuple[Guesses, Guesses]]) -> None:
    talk(5)
    assert len(pairs) > 20 and {len(one) for said, _ in pairs for one in said} >= {1, 3, 5}
    assert [said for said, _ in pairs] == [stepped for _, stepped in pairs]


def test_a_planted_place_is_seen(pairs: list[tuple[Guesses, Guesses]], monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain that ends early."""
    real = FusedForward.chain

    def short(self: FusedForward, spans: Spans, n_places: list[int]) -> np.ndarray:
        found = np.zeros((n_places[0], len(n_places)), np.int32)
        made = real(self, spans, [max(1, n - 1) for n in n_places])
        found[: len(made)] = made
        return found

    monkeypatch.setattr(FusedForward, "chain", short)
    talk(5)
    assert [said for said, _ in pairs] != [stepped for _, stepped in pairs]
