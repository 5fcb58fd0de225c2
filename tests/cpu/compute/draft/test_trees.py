"""Trees that drafters grow: against counting by hand, and a head's against an oracle of transformers' modules."""

from __future__ import annotations

import pathlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from calling_device import CallingDevice, LiveChains, LivePlans
from family_cases import random_checkpoint
from head_case import Oracle, drafting, work, write
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.compute import platform
from quire.compute.draft import eagle
from quire.compute.draft.drafter import DraftContext, DraftTree, Guess, straightest
from quire.compute.draft.suffix import SuffixDrafter
from quire.compute.platform import CudaPlatform
from quire.engine import workers

pytestmark = pytest.mark.usefixtures("timed_briefly")

TAPS = (1, 2, 4)


def nodes_of(guess: Guess) -> DraftTree:
    return guess if isinstance(guess, DraftTree) else DraftTree(guess, list(range(-1, len(guess) - 1)))


def paths_of(guess: Guess) -> list[tuple[int, ...]]:
    """The tokens from the known one down to each node."""
    tree, found = nodes_of(guess), list[tuple[int, ...]]()
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return found


def test_the_likeliest_path_stands_first() -> None:
    assert straightest([7, 8, 9], [-1, 0, 1]) == [7, 8, 9]
    tree = straightest([1, 2, 3, 4, 5], [-1, -1, 0, 1, 2])
    assert tree == DraftTree([1, 3, 5, 2, 4], [-1, 0, 1, -1, 3])
    assert tree.paths == [0b1, 0b11, 0b111, 0b1000, 0b11000]


def shares(text: list[int], path: tuple[int, ...], longest: int) -> float:
    """The share of the places with the same `longest` last tokens that go on so."""
    chance, known = 1.0, tuple(text[len(text) - longest :])
    for token in path:
        n = len(known)
        after = [text[i + n] for i in range(len(text) - n) if tuple(text[i : i + n]) == known]
        chance *= after.count(token) / len(after) if after else 0.0
        known = (*known, token)
    return chance


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=3, max_size=40), st.integers(1, 9), st.integers(1, 3))
def test_suffix_trees_are_what_counting_by_hand_finds(text: list[int], n: int, most: int) -> None:
    """As deep as the tree of suffixes is, no token is forgotten on the way."""
    drafter = SuffixDrafter(max_tree_depth=100, max_spec_factor=9.0, min_token_prob=0.0)
    drafter.open(0, "", 1)
    tokens = np.array(text, np.int32)
    longest = max(
        (m for m in range(len(text)) if any(text[i : i + m] == text[len(text) - m :] for i in range(len(text) - m))),
    )
    paths = paths_of(drafter.branch(0, tokens, n, most))
    assert len(paths) <= n and len(set(paths)) == len(paths) and bool(paths) == bool(longest)
    assert max(Counter(path[:-1] for path in paths).values(), default=0) <= most
    chances = {path: shares(text, path, longest) for path in paths}
    assert all(chances.values())
    if len(paths) == n and most == 3:
        other = [(*path, token) for path in [(), *paths] for token in range(3) if (*path, token) not in chances]
        assert min(chances.values()) >= max(shares(text, path, longest) for path in other) - 1e-9
    if most == 1:
        assert paths[-1:] == [tuple(drafter.guess(0, tokens, n))][: len(paths)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def oracle(folder: pathlib.Path) -> Oracle:
    model = random_checkpoint(folder, "Llama", num_hidden_layers=6, max_position_embeddings=256)
    write(folder / "head", eagle_aux_hidden_state_layer_ids=list(TAPS))
    return Oracle(model, folder / "head", TAPS)


def children(oracle: Oracle, known: list[int], path: tuple[int, ...]) -> list[tuple[int, float]]:
    """The head's guesses behind a path, the best first, and their logarithms of probability."""
    features = oracle.features(known[:-1])
    features = torch.cat((torch.zeros(1, features.shape[1]), features))
    tokens = list(known)
    with torch.no_grad():
        for token in (*path, None):
            state = oracle._layer(torch.tensor(tokens), features)[-1:]
            features = torch.cat((features, state))
            tokens.append(token or 0)
        logits = (oracle._norm(state, "norm") @ oracle._tensors["lm_head.weight"].T)[0].log_softmax(-1)
    order = logits.argsort(descending=True)
    ids = order + oracle._tensors["d2t"][order].long()
    return list(zip(ids.tolist(), logits[order].tolist(), strict=True))


SHAPES: dict[str, dict[str, Any]] = {
    "grown": {"branching": 3, "num_speculative_tokens": 4},
    "fixed": {"speculative_token_tree": "[(0,), (1,), (0, 0), (1, 0)]"},
}


APART: dict[str, Any] = {"num_gpu_blocks_override": 200, "max_num_seqs": 64, "max_num_batched_tokens": 128}


def go_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines have a device apart, whose steps of a head are captured chains, and trees beside these."""
    LivePlans(monkeypatch)
    LiveChains(monkeypatch)
    monkeypatch.setattr(platform.cuda, "CudaDevice", CallingDevice)
    monkeypatch.setattr(workers, "platform_of", lambda config, rank: CudaPlatform(captures=True))


@pytest.fixture(autouse=True)
def as_many_threads() -> Iterator[None]:
    n_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(n_threads)


@pytest.mark.parametrize("way", ["native", "eager", "apart"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_heads_trees_are_the_oracles(
    folder: pathlib.Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch, shape: str, way: str
) -> None:
    seen: list[tuple[DraftContext, list[int], Guess]] = []
    real = eagle.EagleDrafter.guess

    def spy(self: Any, contexts: Sequence[DraftContext]) -> list[Guess]:
        known = [context.tokens.tolist() for context in contexts]
        found = real(self, contexts)
        seen.extend(zip(contexts, known, found, strict=True))
        return found

    monkeypatch.setattr(eagle.EagleDrafter, "guess", spy)
    if way == "eager":
        monkeypatch.setattr("quire.compute.draft.with_head.obstacle", lambda head: "told so")
    if way == "apart":
        go_apart(monkeypatch)
    options = APART if way == "apart" else {}
    config = {"method": "eagle3", "model": str(folder / "head")}
    llm = drafting(folder, speculative_config=config | SHAPES[shape], **options)
    seen.clear()
    said = work(llm)
    llm.shutdown()
    plain = drafting(folder, speculative_config=None, **options)
    assert work(plain) == said
    plain.shutdown()
    trees = [one for one in seen if isinstance(one[2], DraftTree)]
    assert len(trees) > 60
    for context, known, guess in trees[:: len(trees) // 8]:
        paths = set(paths_of(guess))
        assert len(paths) == context.most
        if shape == "fixed":
            first, second = (token for token, _ in children(oracle, known, ())[:2])
            below = [(token, children(oracle, known, (token,))[0][0]) for token in (first, second)]
            assert paths == set([(first,), (second,), *below][: context.most])
        else:
            check_grown(oracle, known, paths, 3)


def check_grown(oracle: Oracle, known: list[int], paths: set[tuple[int, ...]], most: int) -> None:
    """Each is among the best behind its parent, and no guess left out behind one of them is likelier than one in it."""
    chances: dict[tuple[int, ...], float] = {}
    for above in {path[:-1] for path in paths}:
        for token, chance in children(oracle, known, above)[:most]:
            chances[*above, token] = chance
    total = {path: sum(chances[path[: i + 1]] for i in range(len(path))) for path in paths}
    others = [path for path in chances if path not in paths]
    left_out = [sum(chances[path[: i + 1]] for i in range(len(path))) for path in others]
    assert max(left_out, default=-np.inf) <= min(total.values()) + 1e-4
