"""The prefix tree beside a slow oracle: a set of cached paths, page by page."""

from __future__ import annotations

import random

import pytest

from quire.control.pages import PageError, PagePool
from quire.control.tree import PrefixTree

SIZE = 2


def build(n_pages: int = 64) -> tuple[PagePool, PrefixTree]:
    pool = PagePool(n_pages)
    return pool, PrefixTree(pool, SIZE)


def put(pool: PagePool, tree: PrefixTree, tokens: list[int], salt: str = "") -> list[int]:
    """Cache all full pages of `tokens`, as a sequence that ends does; returns its pages."""
    pages = pool.take(len(tokens) // SIZE)
    node, n_pages = tree.extend(salt, None, 0, tokens, [pages], len(pages), through=True)
    assert n_pages == len(pages)
    if node is not None:
        tree.unlock(node)
    pool.drop(pages)
    return pages


def found(tree: PrefixTree, tokens: list[int], salt: str = "") -> list[int]:
    return tree.match(salt, tokens, len(tokens)).tables[0]


def test_match_finds_whole_pages_only() -> None:
    pool, tree = build()
    pages = put(pool, tree, [1, 2, 3, 4, 5])
    assert len(pages) == 2 and pool.n_free == 61
    assert found(tree, [1, 2, 3, 4, 5]) == pages
    assert found(tree, [1, 2, 3, 9]) == pages[:1]
    assert found(tree, [1]) == [] and found(tree, [2, 1]) == []
    assert tree.match("", [1, 2, 3, 4], 3).tables[0] == pages[:1], "the limit counts tokens"


def test_salts_are_apart_and_empty_roots_go() -> None:
    pool, tree = build()
    put(pool, tree, [1, 2], "a")
    assert found(tree, [1, 2], "b") == [] and found(tree, [1, 2]) == []
    tree.evict(1)
    assert tree.roots == {} and pool.n_free == 63


def test_a_split_keeps_both_ends_and_their_locks() -> None:
    pool, tree = build()
    first = put(pool, tree, [1, 2, 3, 4, 5, 6])
    node = tree.lock(tree.match("", [1, 2, 3, 4, 5, 6], 6))
    second = put(pool, tree, [1, 2, 3, 4, 7, 8])
    assert found(tree, [1, 2, 3, 4, 5, 6]) == first
    assert found(tree, [1, 2, 3, 4, 7, 8]) == [*first[:2], second[2]]
    assert tree.n_nodes == 3 and tree.n_unlocked == 1 and node is not None
    with pytest.raises(PageError):
        tree.evict(2)
    tree.evict(1)
    assert found(tree, [1, 2, 3, 4, 7, 8]) == first[:2], "only the unlocked branch can go"
    tree.unlock(node)
    assert tree.n_unlocked == 3
    with pytest.raises(PageError, match="unlocked more often"):
        tree.unlock(node)


def test_a_page_that_is_there_keeps_its_place() -> None:
    pool, tree = build()
    first = put(pool, tree, [1, 2, 3, 4])
    own = pool.take(2)
    node, n_pages = tree.extend("", None, 0, [1, 2, 3, 4], [own], 2, through=False)
    assert node is None and n_pages == 0, "one who stays does not lock what it does not use"
    assert found(tree, [1, 2, 3, 4]) == first
    pool.drop(own)
    assert pool.n_free == 61


def test_one_sequence_grows_one_node() -> None:
    pool, tree = build()
    tokens, pages = list(range(20)), pool.take(10)
    node, n_held = None, 0
    for end in (3, 7, 10):
        node, n_held = tree.extend("", node, n_held, tokens, [pages], end, through=False)
    assert tree.n_nodes == 1 and tree.n_pages == 10 and n_held == 10 and tree.n_unlocked == 0


def test_eviction_takes_the_longest_unused_end_first() -> None:
    pool, tree = build()
    old, new = put(pool, tree, [1, 2, 3, 4]), put(pool, tree, [5, 6])
    tree.evict(1)
    assert found(tree, [1, 2, 3, 4]) == old[:1], "the end of a path goes before its beginning"
    node = tree.lock(tree.match("", [1, 2], 2))
    assert node is not None
    tree.unlock(node)
    tree.evict(1)
    assert found(tree, [5, 6]) == [] and found(tree, [1, 2]) == old[:1], "use makes young"
    assert pool.refs[new[0]] == 0


def test_the_eviction_order_stays_bounded() -> None:
    pool, tree = build()
    put(pool, tree, [1, 2, 3, 4])
    for _ in range(1000):
        node = tree.lock(tree.match("", [1, 2, 3, 4], 4))
        assert node is not None
        tree.unlock(node)
    assert len(tree._order) < 80


def test_a_miss_names_the_first_token_that_differs() -> None:
    pool, tree = build()
    put(pool, tree, [1, 2, 3, 4, 5, 6])
    put(pool, tree, [1, 2, 9, 9])
    miss = tree.explain("", [1, 2, 3, 7, 5, 6])
    assert (miss.n_matched, miss.position, miss.wanted, miss.cached) == (2, 3, 7, 4)
    miss = tree.explain("", [1, 2, 3, 4, 5])
    assert (miss.n_matched, miss.position, miss.wanted, miss.cached) == (4, 5, None, 6)
    miss = tree.explain("", [1, 2, 3, 4, 5, 6, 7])
    assert (miss.n_matched, miss.position, miss.wanted, miss.cached) == (6, 6, 7, None)
    miss = tree.explain("other", [1, 2])
    assert (miss.n_matched, miss.position, miss.wanted, miss.cached) == (0, 0, 1, None)


def test_detach_takes_everything_below() -> None:
    pool, tree = build()
    first = put(pool, tree, [1, 2, 3, 4, 5, 6])
    put(pool, tree, [1, 2, 3, 4, 7, 8])
    put(pool, tree, [1, 2, 9, 9])
    node = tree.lock(tree.match("", [1, 2, 3, 4, 7, 8], 6))
    with pytest.raises(PageError, match="locked"):
        tree.detach(tree.cut("", [1, 2, 3, 4], 1))
    assert node is not None
    tree.unlock(node)
    tree.detach(tree.cut("", [1, 2, 3, 4], 1))
    assert found(tree, [1, 2, 3, 4]) == first[:1] and len(found(tree, [1, 2, 9, 9])) == 2
    assert tree.n_pages == 2 == tree.n_unlocked and pool.n_free == 61
    tree.clear()
    assert pool.n_free == 63 and tree.n_nodes == 0


def test_against_a_set_of_paths() -> None:
    """Random puts, matches and evictions; metadata never outgrows pages."""
    rng = random.Random(3)
    pool, tree = build(40)
    paths: set[tuple[str, tuple[int, ...]]] = set()
    for _ in range(3000):
        tokens = [rng.randint(1, 2) for _ in range(rng.randint(0, 12))]
        salt = rng.choice(["", "x"])
        n_known = next((n for n in range(len(tokens) // SIZE, 0, -1) if (salt, tuple(tokens[: n * SIZE])) in paths), 0)
        assert len(found(tree, tokens, salt)) == n_known
        n_wanted = len(tokens) // SIZE
        if rng.random() < 0.5:
            if pool.n_free < n_wanted:
                tree.evict(n_wanted - pool.n_free)
            put(pool, tree, tokens, salt)
        elif tree.n_unlocked:
            tree.evict(rng.randint(1, min(3, tree.n_unlocked)))
        paths = set(all_paths(tree))
        assert tree.n_nodes <= tree.n_pages == len(paths) == 39 - pool.n_free


def all_paths(tree: PrefixTree) -> list[tuple[str, tuple[int, ...]]]:
    paths = []
    for salt, root in tree.roots.items():
        stack = [(child, ()) for child in root.children.values()]
        while stack:
            node, before = stack.pop()
            for i in range(node.n_pages):
                paths.append((salt, (*before, *node.tokens[: (i + 1) * SIZE])))
            stack += [(child, (*before, *node.tokens)) for child in node.children.values()]
    return paths
