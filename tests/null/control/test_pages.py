"""The page pool: exact counts, refusals that change nothing."""

from __future__ import annotations

import pytest

from quire.control.pages import PageError, PagePool


def test_pages_come_and_go() -> None:
    pool = PagePool(5)
    taken = pool.take(4)
    assert sorted(taken) == [1, 2, 3, 4] and pool.n_free == 0, "page 0 is the dummy page"
    pool.drop([taken[1]])
    assert pool.take(1) == [taken[1]]


def test_too_many_pages_are_refused_whole() -> None:
    pool = PagePool(4)
    with pytest.raises(PageError, match="4 pages wanted, 3 are free"):
        pool.take(4)
    assert pool.n_free == 3 and pool.refs == [0, 0, 0, 0]
    assert pool.take(0) == []


def test_a_shared_page_is_free_after_its_last_owner() -> None:
    pool = PagePool(3)
    (page,) = pool.take(1)
    pool.share([page])
    pool.drop([page])
    assert pool.n_free == 1 and pool.refs[page] == 1
    pool.drop([page])
    assert pool.n_free == 2


@pytest.mark.parametrize("page", [0, 1])
def test_a_free_page_cannot_be_freed_or_shared(page: int) -> None:
    pool = PagePool(3)
    for act in (pool.drop, pool.share):
        with pytest.raises(PageError):
            act([page])
    assert sorted(pool._free) == [1, 2]
