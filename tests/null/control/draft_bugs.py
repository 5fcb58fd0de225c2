"""Bugs of decoding with drafts, as those of `bugs.py`."""

from __future__ import annotations

from typing import Any

import pytest

from quire.control import commit, drafting, scheduler
from quire.control.plan_builder import PlanBuilder
from quire.control.scheduler import Scheduler
from quire.control.seq import Seq
from quire.engine.executors.null import NullExecutor

Patch = pytest.MonkeyPatch


def rejected_drafts_stay_planned(patch: Patch) -> None:
    def advance(self: Seq, start: int, length: int, n_rejected: int) -> None:
        real(self, start, length, n_rejected)
        self.planned += n_rejected

    real = Seq.advance
    patch.setattr(Seq, "advance", advance)


def rejected_drafts_count_as_computed(patch: Patch) -> None:
    def advance(self: Seq, start: int, length: int, n_rejected: int) -> None:
        real(self, start, length, n_rejected)
        self.computed += n_rejected

    real = Seq.advance
    patch.setattr(Seq, "advance", advance)


def drafts_behind_the_end_count(patch: Patch) -> None:
    def append(live: Any, seq: Seq, tokens: list[int], rows: list[Any], deltas: list[Any]) -> None:
        first = len(deltas)
        real(live, seq, tokens, rows, deltas)
        deltas[first].token_ids = list(tokens)

    real = commit._append_tokens
    patch.setattr(commit, "_append_tokens", append)


def drafts_go_beyond_the_limit(patch: Patch) -> None:
    def fitting(live: Any, builder: Any, seq: Seq, most: int) -> int:
        limit, seq.limit = seq.limit, seq.limit + most
        n_drafts = real(live, builder, seq, most)
        seq.limit = limit
        return n_drafts

    real = drafting._fitting
    patch.setattr(drafting, "_fitting", fitting)


def drafts_need_no_pages(patch: Patch) -> None:
    patch.setattr(drafting, "_fitting", lambda live, builder, seq, most: min(most, seq.limit - seq.planned - 1))


def starts_are_said_to_be_known(patch: Patch) -> None:
    def schedule(self: Scheduler) -> Any:
        plan = real(self)
        if plan is not None:
            plan.knows_starts = True
        return plan

    real = Scheduler.schedule
    patch.setattr(Scheduler, "schedule", schedule)


def drafts_take_the_masks_away(patch: Patch) -> None:
    def plan(live: Any, builder: PlanBuilder, wanted: dict[Seq, int]) -> Any:
        prompts = real(live, builder, wanted)
        builder.plan.masked = [span for span in builder.plan.masked if not builder.plan.spans.n_drafts[span]]
        return prompts

    real = drafting.plan_with_drafts
    patch.setattr(scheduler, "plan_with_drafts", plan)


def drafts_are_chosen_under_the_mask_before_them(patch: Patch) -> None:
    """A stale state of the grammar: that of the known tokens, at every place."""

    def allowed(self: NullExecutor, masked: list[int], masks: Any) -> Any:
        return {span: [lines[0]] * len(lines) for span, lines in real(self, masked, masks).items()}

    real = NullExecutor._allowed
    patch.setattr(NullExecutor, "_allowed", allowed)


def masks_are_one_place_late(patch: Patch) -> None:
    def allowed(self: NullExecutor, masked: list[int], masks: Any) -> Any:
        return {span: [lines[0], *lines[:-1]] for span, lines in real(self, masked, masks).items()}

    real = NullExecutor._allowed
    patch.setattr(NullExecutor, "_allowed", allowed)


BUGS = [
    rejected_drafts_stay_planned,
    rejected_drafts_count_as_computed,
    drafts_behind_the_end_count,
    drafts_go_beyond_the_limit,
    drafts_need_no_pages,
    starts_are_said_to_be_known,
    drafts_take_the_masks_away,
    drafts_are_chosen_under_the_mask_before_them,
    masks_are_one_place_late,
]
