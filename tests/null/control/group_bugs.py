"""Bugs of layers in groups, as those of `bugs.py`."""

from __future__ import annotations

from typing import Any

import pytest

from quire.control import paths
from quire.control.admission import Admission
from quire.control.cache import PageCache
from quire.control.plan_builder import PlanBuilder
from quire.control.seq import Seq

Patch = pytest.MonkeyPatch


def _give_back_as_if(patch: Patch, computed: Any) -> None:
    def give_back(self: PageCache, seq: Seq) -> None:
        kept, seq.computed = seq.computed, computed(self, seq)
        real(self, seq)
        seq.computed = kept

    real = PageCache.give_back
    patch.setattr(PageCache, "give_back", give_back)


def window_gives_a_page_back_too_early(patch: Patch) -> None:
    _give_back_as_if(patch, lambda cache, seq: seq.computed + cache.page_size)


def window_gives_back_by_what_is_planned(patch: Patch) -> None:
    _give_back_as_if(patch, lambda cache, seq: seq.planned)


def hit_lacks_pages_of_a_window(patch: Patch) -> None:
    patch.setattr(paths, "_n_usable", lambda tables, windows, page_size: len(tables[0]))


def fork_copies_in_the_first_group_only(patch: Patch) -> None:
    def fork(self: Admission, seq: Seq, sibling: Seq) -> bool:
        copied.clear()
        return real_fork(self, seq, sibling)

    def copy(self: PlanBuilder, source: int, target: int, n: int) -> None:
        if not copied:
            real_copy(self, source, target, n)
        copied.append(source)

    copied: list[int] = []
    real_fork, real_copy = Admission._fork, PlanBuilder.copy
    patch.setattr(Admission, "_fork", fork)
    patch.setattr(PlanBuilder, "copy", copy)


BUGS = [
    window_gives_a_page_back_too_early,
    window_gives_back_by_what_is_planned,
    hit_lacks_pages_of_a_window,
    fork_copies_in_the_first_group_only,
]
