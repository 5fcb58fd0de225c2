"""The suffix tree against counting by hand, whole, after texts were taken out, and in bytes."""

from __future__ import annotations

import collections
import gc
import random
import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.compute.draft.suffix_tree import END, ROOT, Place, SuffixTree, most_bytes

TEXTS = st.integers(1, 4).flatmap(lambda last: st.lists(st.lists(st.integers(0, last), max_size=30), max_size=6))


def strings_of(tree: SuffixTree) -> dict[tuple[int, ...], int]:
    """Each string of the tree, up to its depth + 1 or to an END, with its count. Checks what always holds."""
    counts: dict[tuple[int, ...], int] = {}
    nodes: dict[tuple[int, ...], int] = {}
    waiting: list[tuple[int, tuple[int, ...]]] = [(ROOT, ())]
    while waiting:
        node, string = waiting.pop()
        nodes[string] = node
        children = tree._children[node]
        assert node == ROOT or len(children) > 1
        for token, child in children.items():
            first = tree._position[child] - tree._base
            label = tuple(tree.tokens[first : first + tree._depth[child]])
            if END in label:
                label = label[: label.index(END) + 1]
            assert label[: len(string) + 1] == (*string, token) and tree._parent[child] == node
            for length in range(len(string) + 1, len(label) + 1):
                counts[label[:length]] = tree._count[child]
            if tree._children[child]:
                waiting.append((child, label))
        if node != ROOT:
            assert tree._best[node] in (ROOT, best_of(tree, node))
            assert sum(tree._count[child] for child in children.values()) == tree._count[node]
    for string, node in nodes.items():
        if string:
            assert tree._link[node] == nodes[string[1:]]
    assert len(nodes) + sum(1 for string in counts if is_leaf(string, counts)) == tree.n_nodes
    return counts


def is_leaf(string: tuple[int, ...], counts: dict[tuple[int, ...], int]) -> bool:
    return not any(longer[:-1] == string for longer in counts if len(longer) == len(string) + 1)


def best_of(tree: SuffixTree, node: int) -> int:
    children = tree._children[node]
    return max(children.values(), key=lambda child: (tree._count[child], tree._position[child]))


def counted(texts: list[list[int]], depth: int) -> dict[tuple[int, ...], int]:
    """All strings of up to depth + 1 tokens of texts that ended."""
    counts: collections.Counter[tuple[int, ...]] = collections.Counter()
    for text in texts:
        whole = [*text, END]
        for start in range(len(whole)):
            longest = min(len(whole), start + depth + 1)
            counts.update(tuple(whole[start:end]) for end in range(start + 1, longest + 1))
    return dict(counts)


def tree_of(texts: list[list[int]], depth: int) -> SuffixTree:
    tree = SuffixTree(depth)
    for text in texts:
        tree.extend(text)
        tree.end()
    return tree


@settings(max_examples=200, deadline=None)
@given(TEXTS, st.integers(1, 6))
def test_texts_that_ended_are_counted_whole(texts: list[list[int]], depth: int) -> None:
    assert strings_of(tree_of(texts, depth)) == counted(texts, depth)


@settings(max_examples=200, deadline=None)
@given(TEXTS, st.integers(1, 6), st.data())
def test_a_tree_from_which_texts_were_taken_is_the_tree_of_the_others(
    texts: list[list[int]], depth: int, data: Any
) -> None:
    """At any time, also with texts that come between: counts, and which of equally frequent tokens was the last."""
    tree = SuffixTree(depth)
    kept: list[list[int]] = []
    for text in texts:
        tree.extend(text)
        tree.end()
        kept.append(text)
        for _ in range(data.draw(st.integers(0, len(kept)))):
            tree.remove_oldest()
            kept.pop(0)
        assert strings_of(tree) == counted(kept, depth)
        assert best_tokens(tree) == best_tokens(tree_of(kept, depth))
        assert tree.n_texts == len(kept)


def best_tokens(tree: SuffixTree) -> dict[tuple[int, ...], int]:
    """The string of an inner node → the token that follows most often."""
    found = {}
    for node in range(1, len(tree._children)):
        if tree._children[node]:
            first = tree._position[node] - tree._base
            length = tree._depth[node]
            best = tree._best[node] or best_of(tree, node)
            found[tuple(tree.tokens[first : first + length])] = tree.tokens[tree._position[best] - tree._base + length]
    return found


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 2), max_size=60), st.integers(1, 6), st.integers(1, 5))
def test_an_open_text_counts_all_but_the_endings_that_stood_before(text: list[int], depth: int, piece: int) -> None:
    tree = SuffixTree(depth)
    for start in range(0, len(text), piece):
        tree.extend(text[start : start + piece])
    place = tree.place
    assert place.length == longest_ending(text, [text[:-1]], depth)
    expected: collections.Counter[tuple[int, ...]] = collections.Counter()
    for start in range(len(text) - place.length):
        expected.update(tuple(text[start:end]) for end in range(start + 1, min(len(text), start + depth + 1) + 1))
    assert strings_of(tree) == dict(expected)


def longest_ending(text: list[int], texts: list[list[int]], longest: int) -> int:
    """Tokens of the longest ending of `text` that stands somewhere in `texts`."""
    for length in range(min(longest, len(text)), 0, -1):
        if any(
            other[start : start + length] == text[-length:]
            for other in texts
            for start in range(len(other) - length + 1)
        ):
            return length
    return 0


@settings(max_examples=200, deadline=None)
@given(TEXTS, st.lists(st.integers(0, 3), max_size=40), st.integers(1, 6))
def test_a_place_follows_another_text(texts: list[list[int]], text: list[int], depth: int) -> None:
    tree, place = tree_of(texts, depth), Place()
    for length in range(1, len(text) + 1):
        tree.move(place, text, length - 1, length)
        assert place.length == longest_ending(text[:length], texts, depth)


def _text(kind: str, n: int, seed: int) -> list[int]:
    chance = random.Random(seed)
    if kind == "all new":
        return list(range(1000 + seed * n, 1000 + seed * n + n))
    if kind == "at random":
        return [chance.randrange(300, 32_000) for _ in range(n)]
    if kind == "as words":
        return [300 + int(10_000 * chance.random() ** 4) for _ in range(n)]
    if kind == "two tokens":
        return [chance.choice((700, 800)) for _ in range(n)]
    copied = [chance.randrange(300, 32_000) for _ in range(50)]
    text: list[int] = []
    while len(text) < n:
        start = chance.randrange(50)
        text += copied[start : start + chance.randrange(2, 30)]
    return text[:n]


@pytest.mark.parametrize("kind", ["all new", "at random", "as words", "two tokens", "copied"])
@pytest.mark.parametrize(("n_texts", "n"), [(1, 20_000), (200, 100)])
def test_the_estimate_of_memory_is_no_less_than_what_is_held(kind: str, n_texts: int, n: int) -> None:
    texts = [_text(kind, n, seed) for seed in range(n_texts)]
    gc.collect()
    tracemalloc.start()
    try:
        tree = SuffixTree(24)
        for text in texts:
            tree.extend([int(str(token)) for token in text])
            tree.end()
        gc.collect()
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert held <= tree.n_bytes <= 2 * held
    assert tree.n_bytes <= SuffixTree(24).n_bytes + n_texts * most_bytes(n)
