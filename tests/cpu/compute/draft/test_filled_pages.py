"""Which pages have a drafter's keys: those that were marked, for whoever has them with the same tokens."""

from __future__ import annotations

import numpy as np

from quire.compute.device.cpu import CpuDevice
from quire.compute.draft.pages import FilledPages
from quire.compute.runner.tables import SlotTables
from quire.core.plan import PageAppend

TOKENS = np.arange(20, dtype=np.int32)


def filled() -> FilledPages:
    """Slots 0 and 1 share two of three pages."""
    tables = SlotTables(2, 32, 8, CpuDevice())
    tables.append([PageAppend(0, 0, [3, 4, 5]), PageAppend(1, 0, [3, 4, 6])])
    pages = FilledPages(tables)
    for slot in (0, 1):
        pages.open(slot)
    return pages


def test_all_whole_pages_are_found_again() -> None:
    pages = filled()
    assert pages.found(0, TOKENS) == 0
    pages.mark(0, TOKENS)
    assert pages.found(1, TOKENS) == 16


def test_only_what_was_marked() -> None:
    pages = filled()
    pages.found(0, TOKENS)
    pages.mark(0, TOKENS[:9])
    assert pages.found(1, TOKENS) == 8
    pages.mark(0, TOKENS)
    assert pages.found(1, TOKENS) == 16


def test_not_under_other_tokens() -> None:
    pages = filled()
    pages.mark(0, TOKENS)
    others = TOKENS.copy()
    others[9] = 7
    assert pages.found(1, others) == 8
