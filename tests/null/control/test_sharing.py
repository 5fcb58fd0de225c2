"""Hints about shared prefixes: disjoint groups, right page counts, the choice that reads fewest pages."""

from __future__ import annotations

import pytest
from test_scheduler_cases import Rig

from quire.control.sharing import shared_prefixes
from quire.core.errors import ConfigError
from quire.core.plan import StepPlan

PREFIX = list(range(40))


def decode_step(rig: Rig) -> StepPlan:
    """Past the prompts of all that was submitted."""
    for _ in range(2):
        plan = rig.plan()
        rig.scheduler.commit(rig.results.popleft())
    return plan


def rig(**limits: int) -> Rig:
    return Rig(n_pages=300, max_num_batched_tokens=600, max_num_seqs=12, max_model_len=128, **limits)


def test_sequences_with_a_common_prefix_are_one_group() -> None:
    one = rig(min_shared_tokens=16)
    for i in range(4):
        one.submit(f"a{i}", [*PREFIX, *[50 + i] * 9], 8)
    one.submit("alone", [90] * 30, 8)
    plan = decode_step(one)
    slots = {f"a{i}": plan.spans.slots[i] for i in range(4)}
    assert plan.shared_prefixes == [(sorted(slots.values()), 10)]
    pages = {seq.slot: seq.tables[0] for seq in one.scheduler.live.running}
    assert len({tuple(pages[slot][:10]) for slot in slots.values()}) == 1


def test_no_hint_without_the_limit_or_below_it() -> None:
    for minimum, expected in ((0, 0), (40, 1), (41, 0)):
        one = rig(min_shared_tokens=minimum)
        for i in range(2):
            one.submit(f"a{i}", [*PREFIX, *[50 + i] * 9], 8)
        assert len(decode_step(one).shared_prefixes) == expected


def test_a_group_splits_where_that_reads_fewer_pages() -> None:
    """Two families share 4 tokens with each other and 40 more inside: apart they read less."""
    one = rig()
    for family in (60, 70):
        for i in range(3):
            one.submit(f"{family}{i}", [1, 2, 3, 4, *[family] * 40, *[80 + i] * 8], 8)
    decode_step(one)
    groups = shared_prefixes(one.scheduler.live.running, 1)
    assert sorted((len(slots), n_pages) for slots, n_pages in groups) == [(3, 11), (3, 11)]
    assert len({slot for slots, _ in groups for slot in slots}) == 6


def test_pairs_below_a_long_prefix_stay_together() -> None:
    """Four sequences share 40 tokens, pairs of them 4 more: one group of four reads less than two of two."""
    one = rig()
    for pair in (60, 70):
        for i in range(2):
            one.submit(f"{pair}{i}", [*PREFIX, *[pair] * 4, *[80 + i] * 8], 8)
    decode_step(one)
    groups = shared_prefixes(one.scheduler.live.running, 1)
    assert [(len(slots), n_pages) for slots, n_pages in groups] == [(4, 10)]


def test_a_prefix_that_only_waiting_sequences_share_is_no_group() -> None:
    one = rig()
    one.submit("first", [*PREFIX, 5, 6, 7], 8)
    decode_step(one)
    assert shared_prefixes(one.scheduler.live.running, 1) == []


def test_the_limit_is_checked() -> None:
    with pytest.raises(ConfigError, match="min_shared_tokens"):
        rig(min_shared_tokens=-1)
