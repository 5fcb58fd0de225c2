"""Trees of drafts on a real model: whatever branch the truth is hidden in, the tokens are those of plain decoding."""

from __future__ import annotations

import pathlib
import random
from collections.abc import Sequence

import numpy as np
import pytest
from test_drafts import N_REQUESTS, VOCAB, requests, run

from quire.compute.draft.drafter import DraftContext, DraftTree, Guess

N_DRAFTS = 9


class HidingDrafter:
    """Knows what plain decoding said, and hides it in a random tree: a node that goes on with the truth has a true
    child among its children with a chance."""

    def __init__(self, said: dict[tuple[int, ...], list[int]], chance: float, first: bool = False) -> None:
        self._said, self._chance, self._first = said, chance, first
        self.n_trees = self.n_chains = 0
        self.open_slots: set[int] = set()
        self.closed: list[list[int]] = []

    def open(self, slot: int, salt: str, prompt_len: int) -> None:
        assert slot not in self.open_slots
        self.open_slots.add(slot)

    def close(self, slot: int, tokens: np.ndarray) -> None:
        self.open_slots.remove(slot)
        self.closed.append(tokens.tolist())

    def guess(self, contexts: Sequence[DraftContext]) -> list[Guess]:
        return [self._guess(context) for context in contexts]

    def _guess(self, context: DraftContext) -> Guess:
        known = tuple(context.tokens.tolist())
        whole = next(list(prompt) + out for prompt, out in self._said.items() if known[: len(prompt)] == prompt)
        assert list(known) == whole[: len(known)], "the token table holds what was rejected"
        rng = random.Random(f"{whole[0]} {len(known)}")
        if not context.may_branch:
            self.n_chains += 1
            return whole[len(known) : len(known) + context.most]
        tokens, parents, depths, is_true = list[int](), list[int](), list[int](), list[bool]()
        while len(tokens) < context.most:
            parent = rng.choice([-1, *range(len(tokens))]) if tokens else -1
            at = len(known) + (depths[parent] if parent >= 0 else 0)
            goes_on = (parent < 0 or is_true[parent]) and at < len(whole)
            taken = {tokens[node] for node, above in enumerate(parents) if above == parent}
            if goes_on and whole[at] not in taken and rng.random() < self._chance:
                token = whole[at]
            else:
                truth = {whole[at]} if at < len(whole) else set()
                token = rng.choice(sorted(set(range(VOCAB)) - taken - (truth if goes_on else set())))
            tokens.append(token)
            parents.append(parent)
            depths.append(at + 1 - len(known))
            is_true.append(goes_on and token == whole[at])
        self.n_trees += 1
        return DraftTree(tokens, parents)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[int]]:
    return run(tmp_path_factory.mktemp("plain"), 1, 0, None)[0]


def hiding(said: dict[str, list[int]], chance: float) -> HidingDrafter:
    return HidingDrafter({tuple(one.prompt_token_ids): said[one.request_id] for one in requests()}, chance)


@pytest.mark.parametrize("n_pages", [60, 22])
@pytest.mark.parametrize("chance", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_truth_in_a_random_branch(
    tmp_path: pathlib.Path, plain: dict[str, list[int]], depth: int, chance: float, n_pages: int
) -> None:
    """22 pages are too few for four sequences: some are preempted between their drafts."""
    drafter = hiding(plain, chance)
    said, scheduler = run(tmp_path, depth, N_DRAFTS, drafter, n_pages)
    assert said == plain
    wholes = [one.prompt_token_ids + plain[one.request_id] for one in requests()]
    ended = [one for one in drafter.closed if one]  # warming up leaves nothing
    assert len(ended) >= N_REQUESTS - 4 and all(any(one == whole[: len(one)] for whole in wholes) for one in ended)
    assert scheduler.stats().preemptions >= (n_pages == 22)
    drafts = scheduler.live.drafts
    assert drafter.n_trees > 20 and drafter.n_chains > 2, "one of them has penalties, and takes chains"
    if chance == 1.0 and n_pages == 60:
        assert drafts.n_right[2] > 5, "some went three deep"
