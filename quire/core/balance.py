"""Experts that are balanced among ranks: what all ranks are told to do between two steps, and what came of it."""

from __future__ import annotations

import enum

import msgspec


@enum.unique
class BalanceStage(enum.Enum):
    """A part of a rearrangement."""

    MARK = "mark"
    """The window begins whose loads count."""
    PLAN = "plan"
    """It ends: choose where experts go."""
    MOVE = "move"
    """The next layer."""


class BalanceFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Rearrangements of an engine's experts, as rank 0 saw them."""

    n_rearranged: int = 0
    before: float = 0.0
    """Of the last: what the most loaded rank had, over the mean rank, mean of layers; 0: no rows came, or the engine
    has slept since."""
    after: float = 0.0
    """What it would have had of the same rows, as experts are now."""
    n_moved: int = 0
    """Slots that took another expert, of all ranks, since the start."""
    moved_bytes: int = 0
    """That rank 0 took."""
    last_s: float = 0.0
    """For which steps stood still for the last one, together."""
    longest_s: float = 0.0
    """Of these the longest between two steps."""
