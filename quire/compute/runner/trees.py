"""Trees of drafts as rows of a step, and which of their nodes became tokens.

Owns positions by depth, paths, and the walk down a tree. Does not own guesses (`compute/draft`), what a row sees of a
path (`kernels/attention`) nor how a token is chosen.
Invariant: the key of a node lies at the place of its row, behind the known token's, until it is kept and moved to its
position.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from quire.compute.draft.drafter import DraftTree
from quire.compute.runner.batch_builder import FlatBatch
from quire.kernels.attention.schedule.plan import Trees
from quire.kernels.fused_step import TreeRows


@dataclasses.dataclass(frozen=True, slots=True)
class Walk:
    """The way down the tree of a span: what was kept of it, and where that lies."""

    at: int
    """The span's first row among the sampled ones."""
    slot: int
    start: int
    """Position of the known token."""
    nodes: list[int]
    """That were kept, from the root down."""
    tokens: list[int]
    """Chosen behind the known token and behind each of these."""

    @property
    def is_straight(self) -> bool:
        """Whether everything kept lies at its position."""
        return not self.nodes or self.nodes[-1] == len(self.nodes) - 1

    @property
    def sources(self) -> list[int]:
        """Where the keys of nodes lie."""
        return [self.start + 1 + node for node in self.nodes]

    @property
    def targets(self) -> list[int]:
        """Where they belong."""
        return list(range(self.start + 1, self.start + 1 + len(self.nodes)))


def branch(batch: FlatBatch, trees: Mapping[int, DraftTree]) -> None:
    """Make these spans trees: a known token, and the nodes behind it. trees: by span."""
    places, paths, firsts = batch.row_positions, np.zeros(len(batch.row_positions), np.uint64), batch.kv_lens.copy()
    batch.row_positions = places.copy()
    for span, tree in trees.items():
        first, end = batch.q_indptr[span : span + 2].tolist()
        paths[first + 1 : end] = np.array(tree.paths, np.uint64)
        batch.row_positions[first + 1 : end] = places[first] + np.array([path.bit_count() for path in tree.paths])
        firsts[span] = places[first] + 1
    batch.sampled_positions = batch.row_positions[batch.sampled_rows] + 1
    batch.trees = TreeRows(places, Trees(paths, firsts))


def walk(
    tree: DraftTree, tokens: Sequence[int], statuses: Sequence[int], is_right: Callable[[int, int], bool]
) -> list[int]:
    """Nodes that are kept, from the root down: each is the token chosen behind the one before it. tokens, statuses: of
    the root's row and of the nodes'; is_right(draft, token): whether a draft counts."""
    found: list[int] = []
    last, row = -1, 0
    for node, (draft, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
        if parent == last and not statuses[row] and is_right(draft, tokens[row]):
            found.append(node)
            last, row = node, node + 1
    return found
