"""The collector is quiet for a batch and afterwards as it was."""

from __future__ import annotations

import gc

import pytest

from quire.engine.garbage import THRESHOLDS, gc_kept_quiet


def test_all_is_as_it_was_also_after_an_error() -> None:
    before = gc.get_threshold()
    with pytest.raises(KeyError), gc_kept_quiet():
        assert gc.get_threshold() == THRESHOLDS and gc.get_freeze_count() > 1000
        raise KeyError
    assert gc.get_threshold() == before and gc.get_freeze_count() == 0


def test_what_somebody_else_froze_stays_frozen() -> None:
    gc.freeze()
    try:
        n_frozen = gc.get_freeze_count()
        with gc_kept_quiet():
            pass
        assert gc.get_freeze_count() > n_frozen // 2 > 0  # frozen objects may still die by their reference count
    finally:
        gc.unfreeze()
