"""A null device with recurrent states: every span begins with the state of exactly the tokens before it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from quire.control.cache import PageCache
from quire.control.seq import Seq
from quire.control.snapshots import Snapshots
from quire.core.plan import StepPlan
from quire.core.result import StepResult
from quire.engine.executors.null import NullExecutor
from quire.engine.executors.null_pages import require


@dataclasses.dataclass
class States:
    """What a device with recurrent layers has: the tokens that each state has seen."""

    slots: dict[int, list[int]] = dataclasses.field(default_factory=dict)
    kept: dict[int, list[int]] = dataclasses.field(default_factory=dict)

    def before(self, plan: StepPlan, tokens: Callable[[int], list[int]]) -> None:
        for one in plan.restores:
            self.slots[one.slot] = list(self.kept[one.snapshot])
        for slot, start in zip(plan.spans.slots, plan.spans.starts, strict=True):
            state = self.slots.get(slot, []) if start else []
            require(state == tokens(slot)[:start], f"slot {slot} has a state of {len(state)} tokens at {start}")

    def after(self, plan: StepPlan, tokens: Callable[[int], list[int]]) -> None:
        spans = plan.spans
        for slot, start, length in zip(spans.slots, spans.starts, spans.lengths, strict=True):
            self.slots[slot] = tokens(slot)[: start + length]
        ends = {
            slot: (start, start + n) for slot, start, n in zip(spans.slots, spans.starts, spans.lengths, strict=True)
        }
        require(len({one.snapshot for one in plan.saves}) == len(plan.saves), "two states go into one snapshot")
        for one in plan.saves:
            start, end = ends[one.slot]
            require(start < one.n_tokens <= end, f"a state at {one.n_tokens} is no part of [{start}, {end})")
            self.kept[one.snapshot] = tokens(one.slot)[: one.n_tokens]


class KeepsStates(NullExecutor):
    """Before a null device: it has states."""

    states: States

    def _run_spans(self, plan: StepPlan, result: StepResult, allowed: Any) -> None:
        def tokens(slot: int) -> list[int]:
            return self._slots[slot].tokens

        self.states.before(plan, tokens)
        super()._run_spans(plan, result, allowed)
        self.states.after(plan, tokens)


def n_free(snapshots: Snapshots) -> int:
    """Ids that are nowhere, or will be."""
    return len(snapshots._free) + len(snapshots._late)


def check_places(cache: PageCache, running: Iterable[Seq]) -> None:
    """Each id is at one place of the tree, with a running sequence, or free."""
    snapshots, tree = cache.snapshots, cache.tree
    assert snapshots is not None
    nodes = [node for root in tree.roots.values() for node in tree.subtree(root)]
    placed = [one for node in nodes for one in node.snapshots.values()]
    placed += [one for seq in running for one in seq.snapshots.values()]
    assert sorted(placed) == sorted(snapshots._places) and len(placed) + n_free(snapshots) == snapshots.n
    assert all(snapshots._places[one] is node for node in nodes for one in node.snapshots.values())
    assert all(1 <= n <= node.n_pages for node in nodes for n in node.snapshots)
