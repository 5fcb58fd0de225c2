"""A node of the prefix tree, and the answers that a walk gives. Plain records; `tree.py` keeps them right."""

from __future__ import annotations

import dataclasses


class Node:
    """A run of full pages below `parent`; `tokens` holds exactly `len(pages) * page_size` ids."""

    __slots__ = ("children", "lock", "pages", "parent", "salt", "serial", "stamp", "tokens")

    def __init__(self, parent: Node | None, salt: str, tokens: list[int], pages: list[int], serial: int) -> None:
        self.parent = parent
        """None for a root and for a node that has left the tree."""
        self.salt = salt
        self.tokens = tokens
        self.pages = pages
        self.children: dict[bytes, Node] = {}
        """Keyed by the exact token ids of the child's first page, so that no two prefixes are confused; as bytes, whose
        hash is keyed by the interpreter, so that nobody can craft prompts that slow the lookup down."""
        self.lock = 0
        """Sequences whose path ends here or below; it never grows on the way down."""
        self.stamp = 0
        """Tick of the last use; eviction takes the smallest."""
        self.serial = serial
        """Order of creation: makes eviction deterministic between equal stamps."""


@dataclasses.dataclass(slots=True)
class Match:
    """The longest cached path of a prompt. Valid until the tree changes."""

    node: Node | None
    """Deepest node reached; None if there is nothing under this salt."""
    n_in_node: int
    """Pages of `node` that match (all of them, or fewer when the path ends inside the node)."""
    pages: list[int]
    n_unlocked: int
    """How many of `pages` no sequence holds now: taking the match makes them unavailable to others."""


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
