"""Bugs of layers in groups, as those of `bugs.py`."""

from __future__ import annotations

from typing import Any

import pytest

from quire.config import kv
from quire.control import cache, paths
from quire.control.admission import Admission
from quire.control.cache import PageCache
from quire.control.plan_builder import PlanBuilder
from quire.control.seq import Seq
from quire.control.tree import PrefixTree

Patch = pytest.MonkeyPatch
first_page = kv.first_page


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


def hit_is_nothing(patch: Patch) -> None:
    patch.setattr(paths, "_n_usable", lambda tables, windows, page_size: 0)


def _first_page_is(patch: Patch, changed: Any) -> None:
    for module in (cache, paths):
        patch.setattr(module, "first_page", changed)


def window_keeps_a_page_too_long(patch: Patch) -> None:
    _first_page_is(patch, lambda window, n_tokens, size: max(0, first_page(window, n_tokens, size) - 1))


def window_sees_a_token_more(patch: Patch) -> None:
    _first_page_is(patch, lambda window, n_tokens, size: first_page(window + 1, n_tokens, size) if window else 0)


def lost_page_does_not_come_back(patch: Patch) -> None:
    patch.setattr(PrefixTree, "_restore", lambda *args: None)


def sample_never_forks(patch: Patch) -> None:
    patch.setattr(PageCache, "can_fork", lambda self, seq, source: False)


def fork_copies_in_the_first_group_only(patch: Patch) -> None:
    def fork(self: Admission, seq: Seq, sibling: Seq) -> bool:
        copied.clear()
        return real_fork(self, seq, sibling)

    def copy(self: PlanBuilder, seq: Seq, source: int, target: int, n: int) -> None:
        if not copied:
            real_copy(self, seq, source, target, n)
        copied.append(source)

    copied: list[int] = []
    real_fork, real_copy = Admission._fork, PlanBuilder.copy
    patch.setattr(Admission, "_fork", fork)
    patch.setattr(PlanBuilder, "copy", copy)


BUGS = [
    window_gives_a_page_back_too_early,
    window_gives_back_by_what_is_planned,
    hit_lacks_pages_of_a_window,
    hit_is_nothing,
    window_keeps_a_page_too_long,
    window_sees_a_token_more,
    lost_page_does_not_come_back,
    sample_never_forks,
    fork_copies_in_the_first_group_only,
]
