"""`speculative_token_tree`: a fixed shape of drafts in vLLM's spelling, and `branching`: one grown by confidence.

Owns the reading of it and what is refused. Does not own guesses (`compute/draft`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Final

import msgspec

MOST_BRANCHING: Final = 16
Path = tuple[int, ...]
"""Ranks from the known token down: (0, 2) is the third best behind the best."""


class TreeShape(msgspec.Struct, frozen=True):
    """How the drafts of a sequence branch."""

    branching: int
    """The most children of a place."""
    paths: tuple[Path, ...] = ()
    """All nodes, parents first; empty: grown by confidence, as many as there is room for."""


def read_tree(value: str | Sequence[Sequence[int]], most: int) -> TreeShape:
    """value: as "[(0,), (1,), (0, 0)]", or lists; most: nodes. Raises ValueError that says what to do."""
    paths = _parsed(value) if isinstance(value, str) else [tuple(path) for path in value]
    known = set(paths)
    if not paths or () in known:
        raise ValueError('give paths of one rank or more, for instance "[(0,), (1,), (0, 0)]"')
    if len(paths) > most:
        raise ValueError(f"it has {len(paths)} nodes, and a step verifies at most {most}: leave some out")
    if len(known) < len(paths):
        twice = next(path for path in paths if paths.count(path) > 1)
        raise ValueError(f"it names {twice} twice: leave one out")
    for path in paths:
        if not 0 <= min(path) <= max(path) < MOST_BRANCHING:
            raise ValueError(
                f"{path} has a rank outside 0 .. {MOST_BRANCHING - 1}: give the rank among the best tokens"
            )
        above, elder = path[:-1], (*path[:-1], path[-1] - 1)
        if above and above not in known:
            raise ValueError(f"it has {path} and not {above}, behind which that stands: add it")
        if path[-1] and elder not in known:
            raise ValueError(f"it has {path} and not the better {elder}: add it")
    return TreeShape(1 + max(map(max, paths)), tuple(sorted(paths, key=lambda path: (len(path), path))))


def _parsed(text: str) -> list[Path]:
    """Tuples as Python writes them."""
    try:
        found = json.loads(re.sub(r",\s*\]", "]", text.replace("(", "[").replace(")", "]")))
        return msgspec.convert(found, list[Path])
    except (ValueError, RecursionError, msgspec.ValidationError) as error:
        raise ValueError(f'it is no list of paths ({error}): write "[(0,), (1,), (0, 0)]"') from None
