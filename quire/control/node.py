"""A node of the prefix tree, and the answers that a walk gives. Plain records; `tree.py` keeps them right."""

from __future__ import annotations

import dataclasses


class Node:
    """A run of full pages below `parent`; `tokens` holds exactly `n_pages * page_size` ids."""

    __slots__ = ("children", "digests", "lock", "parent", "salt", "serial", "snapshots", "stamp", "tables", "tokens")

    def __init__(self, parent: Node | None, salt: str, tokens: list[int], tables: list[list[int]], serial: int) -> None:
        self.parent = parent
        """None for a root and for a node that has left the tree."""
        self.salt = salt
        self.tokens = tokens
        self.tables = tables
        """The pages of each group of layers, all lists of one length; 0 where a group with a window has none."""
        self.children: dict[bytes, Node] = {}
        """Keyed by the exact token ids of the child's first page, so that no two prefixes are confused; as bytes, whose
        hash is keyed by the interpreter, so that nobody can craft prompts that slow the lookup down."""
        self.snapshots: dict[int, int] = {}
        """Number of its pages → the snapshot of the recurrent state behind them, where one is kept (`snapshots.py`)."""
        self.digests = b""
        """One for each page, one behind the other, while somebody follows what the tree holds (`tree_digests.py`)."""
        self.lock = 0
        """Sequences whose path ends here or below; it never grows on the way down."""
        self.stamp = 0
        """Tick of the last use; eviction takes the smallest."""
        self.serial = serial
        """Order of creation: makes eviction deterministic between equal stamps."""

    @property
    def n_pages(self) -> int:
        """Pages of each group, absent ones counted in."""
        return len(self.tables[0])


@dataclasses.dataclass(slots=True)
class Match:
    """A cached path of a prompt. Valid until the tree changes."""

    node: Node | None
    """Deepest node reached; None if there is nothing under this salt."""
    n_in_node: int
    """Pages of `node` that match (all of them, or fewer when the path ends inside the node)."""
    tables: list[list[int]]
    """Of each group, as in `Node`."""
    n_unlocked: int
    """How many of the pages no sequence holds now: taking the match makes them unavailable to others."""
    snapshot: int = -1
    """Of the state behind the last of them; -1: the model has no states, or nothing matches."""
    n_shared: int = 0
    """Pages that the tree has in common with the prompt, also where no state was kept behind them."""

    @property
    def n_pages(self) -> int:
        """Length of the path."""
        return len(self.tables[0]) if self.tables else 0

    def node_at(self, index: int) -> Node | None:
        """The node of page `index` of the path."""
        node, first = self.node, self.n_pages - self.n_in_node
        while node is not None and first > index:
            node = node.parent
            first -= node.n_pages if node is not None else 0
        return node


@dataclasses.dataclass(frozen=True, slots=True)
class Miss:
    """Why the rest of a prompt was not found: the first token at which the best cached path differs."""

    n_matched: int
    """Tokens that match, counted in whole pages."""
    position: int
    """First position at which prompt and cache differ (at least `n_matched`)."""
    wanted: int | None
    """The prompt's token there; None if the prompt ends there."""
    cached: int | None
    """The cached path's token there; None if the cached path ends there."""
    n_lost: int = 0
    """Of the tokens that match, those that are of no use: keys in the window of the token behind were evicted."""
