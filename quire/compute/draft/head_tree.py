"""Trees of a head's guesses: grown by its probabilities (Li et al. 2024, "EAGLE-2", section 4), or of a fixed shape.

Owns which places are asked next, and which guesses are kept. Does not own the steps (`head_steps.py`), nor what the
head has read of a sequence (`eagle.py`).
A level is one step of the head, all sequences together. The key of the node number i that is asked lies i places behind
the known tokens': all of these are read again with the model's states.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from quire.compute.draft.drafter import DraftContext, Guess, straightest
from quire.compute.draft.head_steps import HeadRows, HeadSteps
from quire.config.token_tree import Path, TreeShape
from quire.kernels.attention.schedule.plan import Trees
from quire.kernels.fused_step import TreeRows

ROOT = -1


@dataclasses.dataclass(slots=True)
class _Node:
    """A guess."""

    token: int
    parent: int
    chance: float
    """Of it and all above it together, as the head sees it."""
    path: Path
    asked_path: int = 0
    """Once the head was asked what follows: bits of the asked nodes on the way to it, and its own."""


class GrowingTree:
    """The guesses of one sequence. most: that are kept in the end."""

    def __init__(self, shape: TreeShape, context: DraftContext) -> None:
        self.slot, self.n_known, self.most = context.slot, len(context.tokens), context.most
        self._width = shape.branching
        self._paths = frozenset(shape.paths[: context.most])
        self._nodes: list[_Node] = []
        self.asked: list[int] = []
        """Nodes whose followers are guessed, in the order of their places."""

    def extend(self, parents: Sequence[int], ids: np.ndarray, chances: np.ndarray) -> list[int]:
        """Take the best guesses behind some nodes, [len(parents), width] both; returns the nodes to be asked next."""
        first = len(self._nodes)
        for parent, tokens, shares in zip(parents, ids.tolist(), chances.tolist(), strict=True):
            above = self._nodes[parent] if parent != ROOT else _Node(0, ROOT, 1.0, ())
            for rank, (token, share) in enumerate(zip(tokens, shares, strict=True)):
                path = (*above.path, rank)
                if not self._paths or path in self._paths:
                    self._nodes.append(_Node(token, parent, above.chance * share, path))
        new = range(first, len(self._nodes))
        if self._paths:
            going_on = {path[:-1] for path in self._paths}
            found = [node for node in new if self._nodes[node].path in going_on]
        else:
            best = set(self._best())
            found = sorted((node for node in new if node in best), key=lambda node: -self._nodes[node].chance)
            found = found[: min(self._width, self.most - 1 - len(self.asked))]
        for node in found:
            one = self._nodes[node]
            above_path = self._nodes[one.parent].asked_path if one.parent != ROOT else 0
            one.asked_path = above_path | 1 << len(self.asked)
            self.asked.append(node)
        return found

    def token(self, node: int) -> int:
        """Of a node."""
        return self._nodes[node].token

    def parent(self, node: int) -> int:
        """Of a node."""
        return self._nodes[node].parent

    def asked_path(self, node: int) -> int:
        """Of a node that was asked."""
        return self._nodes[node].asked_path

    def guess(self) -> Guess:
        """What is kept."""
        kept = sorted(self._best())
        place = {node: i for i, node in enumerate(kept)} | {ROOT: ROOT}
        nodes = [self._nodes[node] for node in kept]
        return straightest([node.token for node in nodes], [place[node.parent] for node in nodes])

    def _best(self) -> list[int]:
        """The likeliest nodes, as many as may be kept; none is likelier than its parent, which comes before it."""
        if self._paths:
            return list(range(len(self._nodes)))
        return sorted(range(len(self._nodes)), key=lambda node: -self._nodes[node].chance)[: self.most]


class TreeGrowth:
    """Grows trees by the steps of a head. token_ids: the model's ids of the head's."""

    def __init__(self, steps: HeadSteps, shape: TreeShape, token_ids: np.ndarray) -> None:
        self._steps, self._shape, self._token_ids = steps, shape, token_ids

    def grow(self, contexts: Sequence[DraftContext], rows: HeadRows) -> list[Guess]:
        """A guess for each context. rows: what the head has not read of them."""
        trees = [GrowingTree(self._shape, context) for context in contexts]
        asked: list[tuple[GrowingTree, list[int]]] = [(tree, [ROOT]) for tree in trees]
        logits = self._steps.begin(rows)
        while True:
            ids, chances = likeliest(logits, self._shape.branching)
            asked, above = _extend(asked, self._token_ids[ids], chances)
            if not asked:
                return [tree.guess() for tree in trees]
            tokens = np.array([tree.token(node) for tree, nodes in asked for node in nodes], np.int32)
            logits = self._steps.level(_level(asked), tokens, above)


def _extend(
    asked: Sequence[tuple[GrowingTree, Sequence[int]]], ids: np.ndarray, chances: np.ndarray
) -> tuple[list[tuple[GrowingTree, list[int]]], np.ndarray]:
    """Gives trees what was found behind the nodes asked, a line each; returns the nodes to be asked next, and int64 of
    each the line of the node before it."""
    line, next_asked, above = 0, list[tuple[GrowingTree, list[int]]](), list[int]()
    for tree, nodes in asked:
        line_of = {node: line + i for i, node in enumerate(nodes)}
        at = slice(line, line + len(nodes))
        line += len(nodes)
        if found := tree.extend(nodes, ids[at], chances[at]):
            next_asked.append((tree, found))
            above += [line_of[tree.parent(node)] for node in found]
    return next_asked, np.array(above, np.int64)


def _level(asked: Sequence[tuple[GrowingTree, Sequence[int]]]) -> HeadRows:
    """The rows of these nodes, the newest that were asked."""
    slots, places, positions, paths = list[int](), list[int](), list[int](), list[int]()
    for tree, nodes in asked:
        slots += [tree.slot] * len(nodes)
        end = tree.n_known + len(tree.asked)
        places += range(end - len(nodes), end)
        paths += [tree.asked_path(node) for node in nodes]
        positions += [tree.n_known - 1 + tree.asked_path(node).bit_count() for node in nodes]
    lengths = [len(nodes) for _, nodes in asked]
    firsts = np.array([tree.n_known for tree, _ in asked], np.int32)
    kv_lens = firsts + np.array([len(tree.asked) for tree, _ in asked], np.int32)
    return HeadRows(
        np.array(slots, np.int64),
        np.array(positions, np.int64),
        np.concatenate(([0], np.cumsum(lengths))).astype(np.int32),
        kv_lens,
        np.array([tree.slot for tree, _ in asked], np.int32),
        TreeRows(np.array(places, np.int64), Trees(np.array(paths, np.uint64), firsts)),
    )


def likeliest(logits: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """logits: float32 [m, width] → ids int64 and probabilities [m, n], the best first."""
    n = min(n, logits.shape[1])
    ids = np.argpartition(logits, -n, 1)[:, -n:] if n < logits.shape[1] else np.tile(np.arange(n), (len(logits), 1))
    best = np.take_along_axis(logits, ids, 1)
    order = np.argsort(-best, 1, kind="stable")
    ids, best = np.take_along_axis(ids, order, 1), np.take_along_axis(best, order, 1)
    total = np.exp(logits - best[:, :1]).sum(1, keepdims=True)
    return ids, np.exp(best - best[:, :1]) / total
