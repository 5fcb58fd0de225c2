"""How many drafts a sequence gets, by what became of its last ones."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from quire.control.acceptance import Acceptance, Places
from quire.control.copy_watch import FRESH, READ_S, SHARE, TRUSTED_SHARE, CopyWatch
from quire.control.draft_policy import (
    MOST_PROBED,
    MOST_QUIET,
    PLAIN_EVERY,
    PLAIN_TRIAL,
    PROBE_SHARE,
    TRIAL,
    DraftPolicy,
)
from quire.control.repeats import ENDING, STREAK, Repeats
from quire.control.seen_costs import SeenCosts, StepKind
from quire.control.seq import Seq
from quire.control.slot_params import slot_params
from quire.core.request import Request
from quire.core.sampling import SamplingParams
from quire.planner import drafts
from quire.planner.drafts import DraftCosts

COSTS = DraftCosts((1, 8), (1.0, 1.7), guess_s=0.01, exposed_s=(0.2,))
MOST = 6


def seq() -> Seq:
    request = Request(request_id="r", prompt_token_ids=[1, 2], params=SamplingParams(), max_tokens=8, seed=0)
    return Seq(request, 0, (0, 0, 0), slot_params(request, 0))


def live(policy: DraftPolicy, one: Seq, right: float, n_steps: int) -> list[int]:
    """Drafts of each step of a sequence whose first `right` drafts, between 0 and 1 of them, are right."""
    lengths = []
    for step in range(n_steps):
        length = policy.choose([one], 1, 32, step)[0] if one.drafts_from <= step else 0
        lengths.append(length)
        if length:
            policy.count(one, step, length, length, int(right * length), 1)
        pass_by(policy, step, length, int(right * length))
    return lengths


def pass_by(policy: DraftPolicy, step: int, length: int, n_right: int, exposed_s: float | None = None) -> None:
    """A step of one sequence, which takes what the start measured if it is not told what is exposed."""
    assert policy.costs is not None
    kind, seconds = StepKind.DRAFTED if length else StepKind.PLAIN, policy.costs.seconds(1 + length)
    if length:
        seconds += policy.costs.guesses_s([length]) + (policy.costs.exposed(1) if exposed_s is None else exposed_s)
    if policy.times(step):
        policy.time(step, 1, [length] if length else [], n_right, seconds, kind)


def test_sure_drafts_are_taken_where_they_gain() -> None:
    """Three more rows for 0.3 of a step and 0.2 beside: four tokens in 1.5 steps; one more row is not worth a wait of
    the same length as a step."""
    policy = DraftPolicy(MOST, COSTS)
    assert policy.takes(3, 1, 7) and not policy.takes(0, 1, 8)
    slow = DraftPolicy(MOST, DraftCosts((1, 8), (1.0, 1.7), guess_s=0.01, exposed_s=(0.8,)))
    assert not slow.takes(1, 1, 7) and slow.takes(3, 1, 7)
    assert DraftPolicy(MOST, None).takes(1, 1, 7)


def test_sure_drafts_say_nothing_of_guesses() -> None:
    policy, one = DraftPolicy(MOST, COSTS), seq()
    policy.choose([one], 1, 32, 0)
    assert one.acceptance is not None
    rate = one.acceptance.rate
    policy.count(one, 0, 4, 4, 4, 1, is_sure=True)
    assert one.acceptance.rate == rate and policy.n_verified == 4
    policy.count(one, 1, 4, 4, 4, 1)
    assert one.acceptance.rate > rate


def test_right_drafts_become_as_many_as_there_may_be() -> None:
    lengths = live(DraftPolicy(MOST, COSTS), seq(), 1.0, 20)
    assert lengths[-1] == MOST


def test_wrong_drafts_end_but_for_probes_within_their_share() -> None:
    lengths = live(DraftPolicy(MOST, COSTS), seq(), 0.0, 2000)
    late = lengths[1000:]
    assert sum(late) > 0 and max(late) == 1
    asking_s = COSTS.exposed(1) + COSTS.guess_s + COSTS.seconds(2) - COSTS.seconds(1)
    assert sum(late) * asking_s <= 1.1 * PROBE_SHARE * len(late) * COSTS.seconds(1)


def test_a_sequence_that_turns_to_copying_gets_drafts_again() -> None:
    policy, one = DraftPolicy(MOST, COSTS), seq()
    live(policy, one, 0.0, 500)
    one.drafts_from = 0
    assert live(policy, one, 1.0, 3 * MOST_QUIET)[-1] == MOST


def test_drafts_that_seem_not_to_pay_are_tried_first() -> None:
    """By what the start measured a draft never pays; they are all right, and steps with some take no longer."""
    slow = DraftCosts((1, 8), (1.0, 1.7), guess_s=0.01, exposed_s=(5.0,))
    policy, one, lengths = DraftPolicy(MOST, slow), seq(), list[int]()
    for step in range(2 * TRIAL):
        lengths += policy.choose([one], 1, 32, step) if one.drafts_from <= step else [0]
        if lengths[-1]:
            policy.count(one, step, lengths[-1], lengths[-1], lengths[-1], 1)
        pass_by(policy, step, lengths[-1], lengths[-1], exposed_s=0.0)
    assert lengths == [MOST] * 2 * TRIAL


@pytest.mark.parametrize(("right", "n_tried"), [(0.8, TRIAL), (0.0, 4)])
def test_a_trial_ends(right: float, n_tried: int) -> None:
    """With its loss, or its twelve steps, or when drafts are wrong."""
    slow = DraftCosts((1, 8), (1.0, 1.7), guess_s=0.01, exposed_s=(4.5,))
    lengths = live(DraftPolicy(MOST, slow), seq(), right, 1000)
    n_drafted = next(i for i, n in enumerate(lengths) if not n)
    assert 2 <= n_drafted <= n_tried and sum(n > 0 for n in lengths[n_drafted:]) <= 3 * TRIAL


@pytest.mark.parametrize("read_s", [0.0, 2.5])
def test_what_is_read_first_does_not_end_a_trial(read_s: float) -> None:
    """That takes as long as 50 plain steps, and the steps behind it show that drafts gain."""
    slow = DraftCosts((1, 8), (1.0, 1.7), guess_s=0.01, exposed_s=(5.0,), read_s=read_s)
    policy, one, lengths = DraftPolicy(MOST, slow), seq(), list[int]()
    for step in range(2 * TRIAL):
        one.planned = 20 + step
        lengths += policy.choose([one], 1, 32, step) if one.drafts_from <= step else [0]
        if lengths[-1]:
            policy.count(one, step, lengths[-1], lengths[-1], lengths[-1], 1)
        pass_by(policy, step, lengths[-1], lengths[-1], exposed_s=20 * read_s if not step else 0.0)
    assert lengths == [MOST] * 2 * TRIAL


def test_a_trial_that_has_lost_much_is_not_soon_made_again() -> None:
    """Of twelve steps that each lose 20 plain ones twelve are made, and no more for long."""
    slow = DraftCosts((1, 8), (1.0, 1.7), guess_s=0.01, exposed_s=(20.0,))
    lengths = live(DraftPolicy(MOST, slow), seq(), 0.8, 800)
    assert sum(n > 0 for n in lengths) <= TRIAL


def test_what_follows_a_right_draft_is_counted_by_its_place() -> None:
    """The first draft is right every other time, those behind it always: 0.5 and 1, of 0.75 in all."""
    places = Places(3)
    assert places.factors == [1.0] * 3
    for step in range(1000):
        places.count(3, 3 * (step % 2))
    overall = (0.5 + 0.5 + 0.5) / (1 + 0.5 + 0.5)
    assert places.factors == pytest.approx([0.5 / overall, 1 / overall, 1 / overall], rel=0.1)


def test_a_run_tells_what_lone_steps_do_not() -> None:
    """Right drafts pay in a run of steps. The first step of each run takes as long as ten plain ones."""
    policy, one, last, lengths = DraftPolicy(MOST, COSTS), seq(), 0, list[int]()
    for step in range(1000):
        last = policy.choose([one], 1, 32, step)[0] if one.drafts_from <= step and step % 100 else 0
        if last:
            policy.count(one, step, last, last, last, 1)
        pass_by(policy, step, last, last, exposed_s=COSTS.exposed(1) if step and lengths[-1] else 10.0)
        lengths.append(last)
    assert lengths[-99:] == [MOST] * 99


def test_lone_steps_do_not_say_what_a_run_takes() -> None:
    policy, seen = DraftPolicy(MOST, COSTS), list[float]()
    for step in range(0, 200, 2):
        policy.choose([seq()], 1, 32, step)
        pass_by(policy, step, MOST, MOST, exposed_s=10.0)
        pass_by(policy, step + 1, 0, 0)
        assert policy._seen is not None
        seen.append(policy._seen.exposed_s(1))
    assert seen[-1] == COSTS.exposed(1) and policy._seen.beginning_s(1) > 3


def test_plain_steps_are_seen_now_and_then() -> None:
    """The machine became three times as fast while all steps had drafts, whose own part has not: they pay no more."""
    policy, one, lengths = DraftPolicy(MOST, DraftCosts((1, 8), (1.0, 1.0), 0.1, (0.2,))), seq(), list[int]()
    for step in range(PLAIN_EVERY + 50):
        length = policy.choose([one], 1, 32, step)[0] if one.drafts_from <= step else 0
        if length:
            policy.count(one, step, length, length, length // 2, 1)
        policy.time(
            step, 1, [length] if length else [], length // 2, 4.0 if length else 3.0 if step < 9 else 0.5,
            StepKind.DRAFTED if length else StepKind.PLAIN,
        )  # fmt: skip
        lengths.append(length)
    assert all(lengths[20 : PLAIN_EVERY - 20]) and lengths[20:].count(0) >= PLAIN_TRIAL


def test_a_trial_is_of_one_sequence() -> None:
    slow = DraftCosts((1, 8), (1.0, 1.7), guess_s=0.01, exposed_s=(5.0,))
    assert DraftPolicy(MOST, slow).choose([seq(), seq(), seq()], 3, 32, 0) == [MOST, 0, 0]


def known(right: float, n_read: int = 0) -> Seq:
    """One of which ten drafts were verified, and whose text was read so far."""
    one = seq()
    one.acceptance, one.planned = Acceptance(10 * right, 10.0, n_read=n_read), 50
    return one


@pytest.mark.parametrize(("read_s", "n_read", "n_with"), [(0.0, 0, 3), (0.1, 0, 1), (0.1, 50, 3)])
def test_a_trial_has_all_that_are_known_to_be_right(read_s: float, n_read: int, n_with: int) -> None:
    """And of whom the drafter has nothing to read; not one of which nothing is known, nor one that is wrong."""
    slow = DraftCosts((1, 8), (1.0, 1.0), guess_s=0.001, exposed_s=(5.0,), read_s=read_s)
    policy = DraftPolicy(MOST, slow)
    seqs = [known(0.9, n_read), known(0.9, n_read), seq(), known(0.1, n_read), known(0.9, n_read)]
    rates = [policy._of(one).rate_beside(0.7) for one in seqs]
    tried, least = policy._tried_together(seqs, rates, 5)
    assert [i for i, rate in enumerate(tried) if rate] == [0, 1, 4][:n_with]
    assert (least > 0) == (n_with == 3), "of one that is read for the first time whatever it promises"


def test_a_step_of_a_trial_has_a_few_drafts_of_one_that_is_not_known_yet_alone() -> None:
    """One row more of eight for half a step is a loss; of a sequence of which nothing is known that is not believed."""
    slow = DraftCosts((1, 8, 16), (1.0, 1.0, 5.0), guess_s=0.001, exposed_s=(0.5,))
    assert not any(DraftPolicy(MOST, slow).choose([known(0.5)], 8, 32, 0))
    assert any(DraftPolicy(MOST, slow).choose([seq()], 8, 32, 0))
    assert any(DraftPolicy(MOST, slow).choose([known(0.5)], 1, 32, 0)), "one sequence alone loses little"


def test_drafts_of_many_must_gain_more_for_another_trial() -> None:
    """As much as plain steps bring is nothing gained: those that begin together end apart."""
    credits = []
    for n_seqs in (1, 8):
        policy = DraftPolicy(MOST, COSTS)
        policy.time(0, n_seqs, [], 0, COSTS.seconds(n_seqs), StepKind.PLAIN)
        before_s = policy._credit_s
        policy.time(1, n_seqs, [n_seqs], n_seqs, 2 * COSTS.seconds(n_seqs), StepKind.DRAFTED)
        credits.append(policy._credit_s - before_s)
    assert credits[0] >= 0 > credits[1]


@pytest.mark.parametrize("copies", [True, False])
def test_a_sequence_that_begins_to_copy_is_asked_at_once(copies: bool) -> None:
    policy, one = DraftPolicy(MOST, COSTS, copies=copies), seq()
    live(policy, one, 0.0, 300)
    one.drafts_from, waits = 1000, 0
    one.tokens = list(range(100, 140))
    while policy.copies is not None and one.drafts_from and waits < 30:
        if waits + 301 >= policy.copies.from_step:
            policy.watch([one], waits + 301)
        one.tokens.append(100 + waits)  # from the fourth on look-up foretells them
        waits += 1
    assert (policy.copies is not None) == copies
    if copies:
        assert waits - 1 == ENDING + STREAK, "the tokens of the copy that were seen"
        assert policy.choose([one], 1, 32, 301 + waits)[0] > 1


def test_a_copy_that_does_not_pay_waits_as_long_as_before() -> None:
    slow = DraftCosts((1, 8), (1.0, 1.7), guess_s=0.01, exposed_s=(50.0,))
    policy, one = DraftPolicy(MOST, slow, copies=True), seq()
    live(policy, one, 0.8, 300)  # the trial is over
    one.drafts_from, one.tokens = 1000, [1, 2, 3, 4, 5, 6, 7, 8, 9] * 3
    policy.watch([one], 301)
    assert one.drafts_from == 0
    assert policy.choose([one], 1, 32, 301) == [0] and one.drafts_from == 1000


def test_drafts_that_are_not_found_count_as_wrong() -> None:
    """Three are asked for, one is there and right: a step does not gain what three right ones would bring."""
    found, short = seq(), seq()
    for one, n_found in ((found, 3), (short, 1)):
        policy = DraftPolicy(MOST, COSTS)
        for step in range(12):
            policy.choose([one], 1, 32, step)
            policy.count(one, step, 3, n_found, n_found, 1)
    assert found.acceptance is not None and short.acceptance is not None
    assert found.acceptance.rate > 0.9 > 0.6 > short.acceptance.rate


def test_a_sequence_whose_drafter_finds_nothing_is_left_alone_ever_longer() -> None:
    policy, one, asked = DraftPolicy(MOST, COSTS), seq(), []
    for step in range(3000):
        if one.drafts_from <= step and policy.choose([one], 1, 32, step)[0]:
            asked.append(step)
            policy.count(one, step, 1, 0, 0, 1)
        pass_by(policy, step, int(step in asked[-1:]), 0)
    gaps = [b - a for a, b in itertools.pairwise(asked)]
    assert gaps == sorted(gaps) and gaps[0] == 1 and 10 < gaps[-1] <= MOST_QUIET


def test_a_new_sequence_begins_where_others_have_come() -> None:
    policy = DraftPolicy(MOST, COSTS)
    live(policy, seq(), 1.0, 30)
    good = policy.choose([seq()], 1, 32, 0)[0]
    for _ in range(40):
        live(policy, seq(), 0.0, 300)
    assert policy.choose([seq()], 1, 32, 0)[0] < good


def test_what_steps_really_take_counts() -> None:
    """Steps with drafts that take ten times as long as was measured at the start stop the drafts."""
    policy, one = DraftPolicy(MOST, COSTS), seq()
    for step in range(TRIAL):
        assert policy.choose([one], 1, 32, step)[0] > 1
    for step in range(100, 200):
        policy.time(2 * step, 1, [MOST], 0, 10 * COSTS.seconds(1 + MOST), StepKind.DRAFTED)
        policy.time(2 * step + 1, 1, [], 0, COSTS.seconds(1), StepKind.PLAIN)
    assert policy.choose([one], 1, 32, 0)[0] == 0 and one.drafts_from > 1
    new = seq()
    assert policy.choose([new], 1, 32, 0)[0] == 0 and new.drafts_from > 1, "a new one waits for the next probe of all"


def test_sequences_are_asked_together() -> None:
    """Each step with drafts waits for the one before it, however many it asks."""
    policy, seqs, steps = DraftPolicy(MOST, COSTS), [seq() for _ in range(20)], []
    live(policy, seq(), 0.0, 300)
    for step in range(3000):
        begun = seqs[: step // 7 + 1]  # they come one after another
        asked = [one for one in begun if one.drafts_from <= step]
        if asked:
            lengths = policy.choose(asked, len(begun), 64, step)
            steps += [step] if any(lengths) else []
            for one, length in zip(asked, lengths, strict=True):
                if length:
                    policy.count(one, step, length, length, 0, len(begun))
    late = [step for step in steps if step > 1000]
    assert len(late) > 2 and min(b - a for a, b in itertools.pairwise(late)) >= 64


def test_a_few_of_many_sequences_are_asked_whether_drafts_have_become_better() -> None:
    policy, seqs, asked = DraftPolicy(MOST, COSTS), [seq() for _ in range(32)], set[int]()
    live(policy, seq(), 0.0, 300)
    for step in range(300, 4300):
        due = [one for one in seqs if one.drafts_from <= step]
        lengths = policy.choose(due, 32, 64, step) if due else []
        assert sum(n > 0 for n in lengths) <= MOST_PROBED
        for one, length in zip(due, lengths, strict=True):
            if length:
                policy.count(one, step, length, length, 0, 32)
                asked.add(seqs.index(one))
    assert len(asked) == 32, "in turn"


def test_often_right_drafts_that_do_not_pay_are_not_asked_for_at_each_step() -> None:
    """Rows are so dear that no draft pays, and yet every probe is right."""
    policy, one = DraftPolicy(MOST, DraftCosts((1, 8), (1.0, 15.0), guess_s=0.5)), seq()
    lengths = live(policy, one, 1.0, 4000)
    assert 0 < sum(lengths[500:]) <= 40


def test_the_first_sequences_of_an_engine_learn_from_few_wrong_steps() -> None:
    """Each step with drafts waits, whatever becomes of them: of 256 only a handful may, though nothing is known yet."""
    costs = DraftCosts((1, 8, 64), (1.0, 1.05, 1.5), guess_s=0.001, exposed_s=(0.4, 0.6), exposed_seqs=(1, 8))
    policy, seqs, steps = DraftPolicy(MOST, costs), [seq() for _ in range(8)], []
    for step in range(1, 257):
        asked = [one for one in seqs if one.drafts_from <= step]
        lengths = policy.choose(asked, 8, 64, step) if asked else []
        steps += [step] if any(lengths) else []
        for one, length in zip(asked, lengths, strict=True):
            if length:
                policy.count(one, step, length, length, 0, 8)
    assert 0 < len(steps) <= 5 and steps[-1] > 100


def test_what_steps_are_seen_to_take_is_known_by_the_number_of_their_sequences() -> None:
    """Two sequences lose by drafts as steps with them take twice as long as measured; those of sixteen do not."""
    costs = DraftCosts((1, 16, 128), (1.0, 1.1, 2.0), guess_s=0.0, exposed_s=(0.1,))
    seen = SeenCosts(costs)
    for _ in range(60):
        seen.time(2, [4, 4], costs.seconds(10) + 1.0, StepKind.DRAFTED)
        seen.time(16, [4] * 16, costs.seconds(80) + 0.1, StepKind.DRAFTED)
    assert seen.exposed_s(2) == pytest.approx(1.0, abs=0.01) and seen.exposed_s(3) == seen.exposed_s(2)
    assert seen.exposed_s(16) == pytest.approx(0.1, abs=0.01)
    assert seen.exposed_s(5) == 0.1, "never seen: as measured"


def test_a_host_that_is_slow_for_all_steps_is_no_cost_of_drafts() -> None:
    seen = SeenCosts(COSTS)
    for _ in range(60):
        seen.time(1, [], 1.0 + 0.5, StepKind.PLAIN)
        seen.time(1, [3], COSTS.seconds(4) + 3 * COSTS.guess_s + 0.2 + 0.5, StepKind.DRAFTED)
    assert seen.plain_s(1) == pytest.approx(0.5, abs=0.02)
    assert seen.exposed_s(1) == pytest.approx(0.2, abs=0.05)


def test_one_long_step_is_an_accident() -> None:
    policy = DraftPolicy(MOST, COSTS)
    policy.time(0, 1, [MOST], 0, 1000.0, StepKind.DRAFTED)
    assert policy.choose([seq()], 1, 32, 0)[0] > 1


def test_time_saved_is_what_plain_steps_would_have_taken_longer() -> None:
    policy = DraftPolicy(MOST, COSTS)
    policy.time(0, 1, [3], 2, 2.0, StepKind.DRAFTED)
    assert policy.saved_s == pytest.approx(3 * COSTS.seconds(1) - 2.0)
    policy.time(1, 1, [3], 0, 2.0, StepKind.DRAFTED)
    assert policy.saved_s == pytest.approx(4 * COSTS.seconds(1) - 4.0), "a step in vain took 2 for one plain"
    policy.time(2, 1, [], 0, 1.0, StepKind.PLAIN)
    assert policy.saved_s == pytest.approx(4 * COSTS.seconds(1) - 4.0), "nothing was drafted"


def test_steps_with_drafts_are_no_wider_than_those_that_were_measured() -> None:
    assert DraftPolicy(MOST, COSTS).most_rows == 8
    assert DraftPolicy(9, COSTS).most_rows == 10, "one sequence may have all its drafts"


def test_counts() -> None:
    policy, one = DraftPolicy(3, None), seq()
    policy.count(one, 0, 3, 3, 2, 1)
    policy.count(one, 1, 3, 3, 0, 1)
    policy.count(one, 2, 3, 0, 0, 1)
    assert (policy.n_spans, policy.n_verified, policy.n_right) == (2, 6, [1, 1, 0])


def test_the_kind_of_step_that_does_not_come_follows_the_other() -> None:
    """The machine was ten times as slow while both kinds were seen, and is not any more: whichever kind alone tells it,
    the other is not thought to be slow for ever."""
    for is_drafted in (True, False):
        seen = SeenCosts(COSTS)
        for step in range(400):
            kind = bool(step % 2) if step < 200 else is_drafted
            rows_s = COSTS.seconds(1 + kind) + kind * COSTS.guess_s
            seconds = rows_s + (0.1 + 0.2 * kind) * (10 if step < 200 else 1)
            seen.time(1, [1] if kind else [], seconds, StepKind.DRAFTED if kind else StepKind.PLAIN)
            if step == 199:
                assert seen.plain_s(1) > 0.8 and seen.exposed_s(1) > 1.5
        if is_drafted:
            assert seen.plain_s(1) + seen.exposed_s(1) == pytest.approx(0.3, rel=0.1) and seen.plain_s(1) < 0.35
        else:
            assert seen.plain_s(1) == pytest.approx(0.1, rel=0.1) and seen.exposed_s(1) < 1.3


def test_copies_whose_drafts_are_wrong_are_trusted_less_each_time() -> None:
    """Each text repeats one token for ever, which look-up foretells, and what it drafts is wrong all the same."""
    costs = dataclasses.replace(COSTS, exposed_s=(1.5,))
    policy, n_asked, n_heard = DraftPolicy(MOST, costs, copies=True), list[int](), list[int]()
    live(policy, seq(), 0.0, 300)
    for first in range(300, 300 + 20 * 127, 127):
        one = seq()
        one.tokens, one.drafts_from = [1, 2, 7, 7, 7], 1 << 30
        n_asked.append(0)
        n_heard.append(0)
        for step in range(first, first + 127):
            if one.drafts_from > step:
                policy.watch([one], step)
                n_heard[-1] += one.drafts_from == 0
            n = policy.choose([one], 1, 32, step)[0] if one.drafts_from <= step else 0
            if n:
                policy.count(one, step, n, n, 0, 1)
                n_asked[-1] += 1
            if policy.times(step):
                pass_by(policy, step, n, 0)
            one.tokens.append(7)
    lost_s = 1.5 + costs.guess_s + costs.seconds(2) - costs.seconds(1)
    assert n_asked[0] > 0 and sum(n_asked[10:]) * lost_s <= 0.02 * 10 * 127
    assert n_heard[0] > 2 and sum(n_heard[10:]) <= 3, "of 50 copies"


def test_texts_are_watched_for_a_small_part_of_the_time() -> None:
    """Whatever their number; a larger one where that has just helped, and less often where it has helped little."""
    costs = dataclasses.replace(COSTS, rows=(1, 256), step_s=(3e-4, 3e-3))
    watch, counts = CopyWatch(SeenCosts(costs)), (8, 32, 256)
    assert all(n / watch.every(n) * READ_S <= SHARE * costs.seconds(n) for n in counts)
    slow = CopyWatch(SeenCosts(dataclasses.replace(costs, step_s=(1.0, 1.0))))
    assert [slow.every(n) for n in (1, 4, 5, 256)] == [1, 1, 4, 4]
    assert watch.every(1) == 1
    usual = [watch.every(n) for n in counts]
    watch.count(4, 4)
    assert all(
        SHARE * costs.seconds(n) < n / watch.every(n) * READ_S <= TRUSTED_SHARE * costs.seconds(n) for n in counts
    )
    one, repeats = seq(), Repeats(0)
    for step in range(FRESH):
        watch.read(one, repeats, step)
    assert [watch.every(n) for n in counts] == usual
    for _ in range(40):
        watch.count(4, 0)
    assert not watch.trusts and watch.every(32) == 4 * usual[1]
    assert READ_S / watch.every(1) <= SHARE * costs.seconds(1)


@pytest.mark.parametrize("n", [1, 4, 6, 40])
def test_each_text_has_its_turn(n: int) -> None:
    """And nobody is looked at between the steps that are said."""
    watch = CopyWatch(SeenCosts(dataclasses.replace(COSTS, rows=(1, 256), step_s=(3e-4, 3e-4))))
    seqs = [seq() for _ in range(n)]
    every, looks = watch.every(n), {id(one): list[int]() for one in seqs}
    for step in range(3 * every):
        if step >= watch.from_step:
            for one in watch.turn(seqs, step):
                looks[id(one)].append(step)
                one.tokens.append(step)
                watch.read(one, Repeats(0), step)
    assert all(found == [i % every + k * every for k in range(3)] for i, found in enumerate(looks.values()) if n > 4)
    assert n > 4 or all(len(found) == 1 for found in looks.values()), "no text can copy before four tokens have come"


def test_few_are_asked_where_each_has_much_to_read() -> None:
    """As many as are read in the time that asking takes otherwise; and one is asked when it can be paid."""
    for read_s, n_asked in ((0.0, MOST_PROBED), (0.1 * COSTS.exposed(8) / 100, MOST_PROBED), (1.0, 1)):
        policy = DraftPolicy(MOST, dataclasses.replace(COSTS, read_s=read_s))
        live(policy, seq(), 0.0, 300)
        seqs = [seq() for _ in range(16)]
        for one in seqs:
            one.planned = 100
        assert not any(policy.choose(seqs, 16, 64, 300)), "new ones wait for the next time"
        policy._credit_s = 0.0
        assert not any(policy.choose(seqs, 16, 64, 400)), "there is no credit"
        policy._credit_s = 1000.0
        assert sum(n > 0 for n in policy.choose(seqs, 16, 64, 800)) == n_asked


def test_steps_that_took_no_time_are_nothing_to_divide_by() -> None:
    """A clock may say so of a step that had ended when the one before it was heard of."""
    costs = DraftCosts((1, 4), (1e-3, 2e-3), 0.0)
    seen = SeenCosts(costs)
    for _ in range(50):
        seen.time(1, [], 0.0, StepKind.PLAIN)
    assert costs.seconds(1) + seen.plain_s(1) > 0
    assert costs.choose([0.9], 3, 1, 3, -1e-3, -1e-3) == [0]  # plain steps seem to be free


def test_the_least_that_a_step_takes_is_that_of_the_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """However much less than nothing was seen beside its rows, for both who ask what a plain step takes."""
    seen = SeenCosts(COSTS)
    for _ in range(200):
        seen.time(8, [0] * 8, 0.0, StepKind.PLAIN)
    for least in (0.05, 0.5):
        monkeypatch.setattr(drafts, "LEAST_SHARE", least)
        assert seen.plain_step_s(8) == pytest.approx(COSTS.whole_s(8, -100.0)) == pytest.approx(least * 1.7)
