"""How many tokens prompts have beside sequences that decode, and who counts as waiting for them."""

from __future__ import annotations

import dataclasses

import pytest
from test_scheduler_cases import Rig

from quire.core.beams import BeamTerms
from quire.planner.pace import Pace

BESIDE = Pace(factor=2.0, weights_s=0.0, token_s=1.0, cached_s=0.0, pair_s=0.0, waiting_weight=9.0, min_tokens=1)
"""A token costs 1: beside three decodes prompts have three, and nine more for each of up to three behind the first."""


def decoding(n: int = 3, **limits: object) -> Rig:
    """So many sequences decode."""
    rig = Rig(**{"pace": BESIDE, "enable_prefix_caching": False, "max_model_len": 64, "n_pages": 200, **limits})
    for i in range(n):
        rig.submit(f"stream {i}", [1] * 10, 12)
    assert rig.turn().spans.lengths == [10] * n, "nobody decodes yet: whole prompts"
    return rig


def test_prompts_keep_pace_with_the_decodes_beside_them() -> None:
    """At a context of 3 a token costs half as much again, at 5 five sixths."""
    rig = decoding(pace=dataclasses.replace(BESIDE, pair_s=1 / 6))
    rig.submit("long", [2] * 9, 1)
    assert [rig.turn().spans.lengths[3:] for _ in range(4)] == [[3], [2], [1], [1]]
    rig.run()
    assert len(rig.said["long", 0]) == 1


@pytest.mark.parametrize("n_waiting, limits, n_tokens", [
    (1, {}, 3), (2, {}, 3 + 9), (3, {}, 3 + 18), (4, {}, 3 + 27), (6, {"max_num_seqs": 16}, 3 + 27),
    (6, {"max_num_seqs": 5}, 3 + 9), (6, {"max_num_seqs": 4}, 3), (6, {"n_pages": 14}, 3), (6, {"n_pages": 17}, 3 + 9),
])  # fmt: skip
def test_decodes_bear_more_where_many_wait(n_waiting: int, limits: dict[str, int], n_tokens: int) -> None:
    """Those count for whom there are slots and pages."""
    rig = decoding(**limits)
    for i in range(n_waiting):
        rig.submit(f"waits {i}", [2] * 9, 1)
    assert sum(rig.turn().spans.lengths[3:]) == min(n_tokens, 9 * n_waiting)
    rig.run()


def test_who_runs_but_is_not_done_counts_too() -> None:
    rig = decoding()
    rig.submit("first", [2] * 30, 1)
    assert rig.turn().spans.lengths[3:] == [3]
    for name in "de":
        rig.submit(name, [2] * 30, 1)
    assert rig.turn().spans.lengths[3:] == [3 + 18]
    rig.run()


def test_each_prompt_that_runs_counts() -> None:
    """Also where nobody waits."""
    rig = decoding(long_prefill_token_threshold=10)
    for name in "ab":
        rig.submit(name, [2] * 30, 1)
    assert rig.turn().spans.lengths[3:] == [10, 2], "two wait, one of them behind the other"
    assert rig.turn().spans.lengths[3:] == [10, 2], "two run, nobody waits"
    rig.run()


def test_pages_that_running_prompts_will_take_are_nobodys() -> None:
    rig = decoding(n_pages=19)
    rig.submit("first", [2] * 30, 1)
    assert rig.turn().spans.lengths[3:] == [3]
    for name in "de":
        rig.submit(name, [2] * 9, 1)
    assert rig.turn().spans.lengths[3:] == [3]
    rig.run()


def test_who_waits_for_a_place_of_an_adapter_does_not_count() -> None:
    rig = Rig(pace=BESIDE, enable_prefix_caching=False, max_model_len=64, n_pages=200, n_adapters=1, max_num_seqs=16)
    for i in range(3):
        rig.submit(f"stream {i}", [1] * 10, 12, content_id="A")
    rig.turn()
    rig.submit("long", [2] * 40, 1, content_id="A")
    assert rig.turn().spans.lengths[3:] == [3]
    for i in range(6):
        rig.submit(f"waits {i}", [2] * 9, 1, content_id="B")
    assert rig.turn().spans.lengths[3:] == [3]
    rig.run()


def test_slots_that_memory_forbids_are_nobodys() -> None:
    rig = decoding()
    rig.submit("long", [2] * 40, 1)
    assert rig.turn().spans.lengths[3:] == [3]
    rig.scheduler.backoff.halve()
    for i in range(6):
        rig.submit(f"waits {i}", [2] * 9, 1)
    assert rig.scheduler.backoff.n_seqs == 4
    assert rig.turn().spans.lengths[3:] == [3]
    rig.run()


def test_slots_that_a_search_will_take_are_nobodys() -> None:
    rig = decoding(max_num_seqs=8)
    rig.submit("search", [2] * 40, 4, beams=BeamTerms(4))
    assert rig.turn().spans.lengths[3:] == [3]
    for i in range(6):
        rig.submit(f"waits {i}", [2] * 9, 1)
    assert rig.turn().spans.lengths[3:] == [3 + 9], "of five free slots it lacks three, and two could begin"
    rig.run()


def test_samples_of_one_request_do_not_wait_behind_each_other() -> None:
    """They fork, and compute a token each."""
    rig = decoding(max_num_seqs=16)
    rig.submit("four", [2] * 9, 2, n=4)
    assert [sum(rig.turn().spans.lengths[3:]) for _ in range(3)] == [3, 3, 3]
    rig.submit("eight", [3] * 9, 2, n=8)
    assert sum(rig.turn().spans.lengths) - rig.scheduler.stats().n_running <= 3
    rig.run()


def test_samples_that_recur_do_not_fork_and_wait_like_others() -> None:
    rig = decoding(max_num_seqs=16, has_states=True)
    rig.submit("four", [2] * 9, 2, n=4)
    assert rig.turn().spans.lengths[3:] == [9], "the first has not to keep within three, as four are to be computed"
