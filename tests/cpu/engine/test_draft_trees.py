"""Trees of drafts on a real model: whatever branch the truth is hidden in, the tokens are those of plain decoding."""

from __future__ import annotations

import pathlib
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import worker_rank
from calling_device import LivePlans
from hidden_tree import hidden_tree
from test_drafts import N_REQUESTS, VOCAB, DeviceApart, requests, run

from quire.compute import platform
from quire.compute.draft.drafter import DraftContext, DraftTree, Guess
from quire.compute.forward.eager import EagerForward
from quire.compute.platform import CudaPlatform
from quire.compute.runner import lengths, trees
from quire.compute.runner.branching import Branching
from quire.compute.runner.pool import KVPool

N_DRAFTS = 9


class HidingDrafter:
    """Knows what plain decoding said, and hides it in a random tree: a node that goes on with the truth has a true
    child among its children with a chance."""

    def __init__(self, said: dict[tuple[int, ...], list[int]], chance: float) -> None:
        self._said, self._chance = said, chance
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
        self.n_trees += 1
        return hidden_tree(whole, len(known), context.most, self._chance, rng, VOCAB)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    n_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(n_threads)


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


def test_they_are_native_steps(
    tmp_path: pathlib.Path, plain: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a step has room for their tokens; operation by operation they say the same."""
    n_eager: list[int] = []
    real = EagerForward.run
    monkeypatch.setattr(EagerForward, "run", lambda self, step: n_eager.append(1) or real(self, step))
    room = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 19}}
    drafter = hiding(plain, 0.8)
    assert run(tmp_path, 2, N_DRAFTS, drafter, **room)[0] == plain
    assert drafter.n_trees > 20 and not n_eager
    monkeypatch.setattr(platform, "obstacle", lambda model: "told so")
    drafter = hiding(plain, 0.8)
    assert run(tmp_path, 2, N_DRAFTS, drafter, **room)[0] == plain
    assert drafter.n_trees > 20 and len(n_eager) > 20


MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "keys of 8 bits": ({}, {"kv_cache_dtype": "int8"}),
    "float32": ({}, {"dtype": "float32"}),
    "windows": (
        {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1,
         "layer_types": ["full_attention", "sliding_attention"]},
        {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("model", MODELS)
def test_other_keys(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    """A window is shorter than the drafts of a step."""
    config, options = MODELS[model]
    for name, value in config.items():
        monkeypatch.setitem(worker_rank.CONFIG, name, value)
    expected = run(tmp_path, 1, 0, None, **options)[0]
    drafter = hiding(expected, 0.9)
    said, scheduler = run(tmp_path, 2, N_DRAFTS, drafter, **options)
    assert said == expected and drafter.n_trees > 20 and scheduler.live.drafts.n_right[2] > 5


@pytest.mark.parametrize("captures", [True, False])
@pytest.mark.parametrize("n_pages", [60, 22])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_device_apart(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, depth: int, n_pages: int, captures: bool
) -> None:
    """Which keeps its own tokens, and hears of what was kept from the host."""
    LivePlans(monkeypatch)
    monkeypatch.setattr(platform.cuda, "CudaDevice", DeviceApart)
    speculative = {"method": "ngram", "num_speculative_tokens": 9}
    options = {"platform": CudaPlatform(captures=captures), "dtype": "float32", "speculative_config": speculative}
    expected = run(tmp_path, depth, 0, None, **options)[0]
    drafter = hiding(expected, 0.8)
    assert run(tmp_path, depth, N_DRAFTS, drafter, n_pages, **options)[0] == expected
    assert drafter.n_trees > 20


def rows_are_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    real = trees.branch

    def branch(batch: Any, of: Any) -> None:
        real(batch, of)
        batch.row_positions = batch.trees.places.copy()

    monkeypatch.setattr("quire.compute.runner.runner.branch", branch)


def any_child_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one of another parent."""

    def walk(tree: DraftTree, tokens: Sequence[int], statuses: Sequence[int], is_right: Any) -> list[int]:
        found: list[int] = []
        for node, draft in enumerate(tree.tokens):
            if is_right(draft, tokens[1 + found[-1] if found else 0]):
                found.append(node)
        return found

    monkeypatch.setattr(lengths, "walk", walk)


def keys_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVPool, "move", lambda self, sources, targets: None)


def siblings_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    real = trees.branch

    def branch(batch: Any, of: Any) -> None:
        real(batch, of)
        paths = batch.trees.trees.paths
        paths |= paths >> np.uint64(1)

    monkeypatch.setattr("quire.compute.runner.runner.branch", branch)


def everybody_branches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where penalties read tokens."""
    monkeypatch.setattr(Branching, "may_branch", lambda self, slot: True)


@pytest.mark.parametrize(
    "plant", [rows_are_positions, any_child_counts, keys_stay, siblings_are_seen, everybody_branches]
)
def test_planted_bugs_are_caught(
    tmp_path: pathlib.Path,
    plain: dict[str, list[int]],
    monkeypatch: pytest.MonkeyPatch,
    plant: Callable[[pytest.MonkeyPatch], None],
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        assert run(tmp_path, 2, N_DRAFTS, hiding(plain, 0.8))[0] == plain
