"""Bugs of beam searches, as those of `bugs.py`."""

from __future__ import annotations

from typing import Any

import pytest
from control_model import VOCAB

from quire.control import forking
from quire.control.beam_search import BeamSearch
from quire.control.cache import PageCache
from quire.control.live_seqs import LiveSeqs
from quire.control.plan_builder import PlanBuilder
from quire.control.seq import Seq

Patch = pytest.MonkeyPatch


def fork_of_a_beam_forgets_the_copy(patch: Patch) -> None:
    patch.setattr(PlanBuilder, "copy", lambda self, seq, source, target, n: None)


def members_outlive_their_search(patch: Patch) -> None:
    def drop(self: LiveSeqs, search: BeamSearch | None, trusted: bool) -> None:
        if search is not None and len(search.members) > 2:
            search.members.pop()
        real(self, search, trusted)

    real = LiveSeqs._drop_members
    patch.setattr(LiveSeqs, "_drop_members", drop)


def dead_beams_keep_their_pages(patch: Patch) -> None:
    def release(self: PageCache, seq: Seq, *, keep: bool) -> None:
        if seq.search is None or keep or seq.n_table_pages < 3:
            real(self, seq, keep=keep)

    real = PageCache.release
    patch.setattr(PageCache, "release", release)


def heir_keeps_the_token_of_the_device(patch: Patch) -> None:
    def inherit(live: LiveSeqs, builder: PlanBuilder, search: BeamSearch, beam: Any, member: Seq) -> None:
        if len(beam.tail) == 1:
            search.sampled[member] = beam.tail[0]
        real(live, builder, search, beam, member)

    real = forking._inherit
    patch.setattr(forking, "_inherit", inherit)


def folded_search_takes_another_token(patch: Patch) -> None:
    def fold(self: BeamSearch) -> None:
        real(self)
        for beam in self.beams:
            beam.tail[-1:] = [(token + 1) % VOCAB for token in beam.tail[-1:]]

    real = BeamSearch.fold
    patch.setattr(BeamSearch, "fold", fold)


def end_token_does_not_end(patch: Patch) -> None:
    def build(self: BeamSearch, root: Seq) -> None:
        real(self, root)
        self._end_ids = frozenset()

    real = BeamSearch.__init__
    patch.setattr(BeamSearch, "__init__", build)


BUGS = [
    value for name, value in list(globals().items())
    if callable(value) and getattr(value, "__module__", "") == __name__
]  # fmt: skip
