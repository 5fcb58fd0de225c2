"""Bugs of decoding with drafts, as those of `bugs.py`."""

from __future__ import annotations

from typing import Any

import pytest

from quire.control import commit, drafting
from quire.control.scheduler import Scheduler
from quire.control.seq import Seq

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


BUGS = [
    rejected_drafts_stay_planned,
    rejected_drafts_count_as_computed,
    drafts_behind_the_end_count,
    drafts_go_beyond_the_limit,
    drafts_need_no_pages,
    starts_are_said_to_be_known,
]
