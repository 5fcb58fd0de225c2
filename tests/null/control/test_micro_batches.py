"""A pipeline's steps: equal parts of the sequences, each of which comes again when its token is back; nothing waits."""

from __future__ import annotations

import itertools

import pytest
from test_scheduler_cases import Rig

from quire.core.plan import StepPlan
from quire.planner.pace import Pace


class Pipeline(Rig):
    """As many steps in flight as stages, and one that hides the host's work."""

    def __init__(self, n_stages: int, **limits: object) -> None:
        super().__init__(n_stages=n_stages, pipeline_depth=n_stages + 1, n_pages=200, **limits)
        self.n_stages, self.last = n_stages, dict[int, int]()
        """Of each slot, the step that chose its newest token."""

    def go(self) -> tuple[StepPlan | None, bool]:
        """The next step, and whether the first stage would wait for a token when it begins it."""
        while len(self.results) > self.n_stages:
            self.commit()
        plan = self.scheduler.schedule()
        if plan is None:
            self.commit()
            return None, False
        self.results.append(self.device.submit(plan).result())
        spans = plan.spans
        waits = any(plan.step - self.last.get(slot, -99) < self.n_stages for slot in spans.slots)
        self.last |= {slot: plan.step for slot, wants in zip(spans.slots, spans.wants, strict=True) if wants}
        return plan, waits


@pytest.mark.parametrize("n_stages, n_seqs", [(2, 8), (4, 6), (3, 3)])
def test_no_stage_waits_and_steps_are_alike(n_stages: int, n_seqs: int) -> None:
    rig = Pipeline(n_stages)
    requests = [rig.submit(str(i), [i + 1] * (3 + i), 24) for i in range(n_seqs)]
    found = [rig.go() for _ in range(10 * n_stages)][3 * n_stages :]
    sizes = [len(plan.spans) for plan, waits in found if plan is not None and not waits]
    assert len(sizes) == len(found), "each turn has a step, and none waits"
    assert set(sizes) <= {n_seqs // n_stages, -(-n_seqs // n_stages)}
    assert all(sum(sizes[i : i + n_stages]) == n_seqs for i in range(len(sizes) - n_stages)), "each has its turn"
    while rig.scheduler.has_work():
        rig.go()
    for request in requests:
        rig.check(request)


def test_those_that_are_left_are_dealt_out_again() -> None:
    """All of one step end at once, and others come."""
    rig = Pipeline(2)
    for i in range(4):
        rig.submit(str(i), [i + 1] * 5, 6 if i < 2 else 60)
    for _ in range(30):
        rig.go()
    assert len(rig.ends) == 2
    requests = [rig.submit("new", [9] * 30, 40)]
    after = [rig.go() for _ in range(12)][4:]
    assert [(len(plan.spans), waits) for plan, waits in after if plan] == [(2, False), (1, False)] * 4 or [
        (len(plan.spans), waits) for plan, waits in after if plan
    ] == [(1, False), (2, False)] * 4
    while rig.scheduler.has_work():
        rig.go()
    rig.check(requests[0])


def test_no_token_holds_up_a_prompt() -> None:
    """Fewer sequences than stages: they stay out of steps in which a prompt goes on, until their token is back."""
    rig = Pipeline(4, max_num_batched_tokens=8)
    first = [rig.submit(str(i), [i + 1] * 4, 60) for i in range(2)]
    for _ in range(12):
        rig.go()
    prompt = rig.submit("long", [5] * 100, 4)
    rig.go()
    found = [rig.go() for _ in range(12)]
    assert not any(waits for _, waits in found)
    assert sum(max(plan.spans.lengths) > 1 for plan, _ in found if plan) == 12
    assert sum(1 in plan.spans.lengths for plan, _ in found if plan) == 6
    while rig.scheduler.has_work():
        rig.go()
    for request in [*first, prompt]:
        rig.check(request)


def test_one_alone_is_planned_before_its_token_is_known() -> None:
    """The first stage waits for it, and the host does not."""
    rig = Pipeline(4)
    request = rig.submit("a", [1, 2, 3], 30)
    plans = [rig.go()[0] for _ in range(12)]
    assert all(plans) and len(rig.results) == 5
    assert [plan.step for plan in plans if plan] == list(itertools.islice(itertools.count(), 12))
    while rig.scheduler.has_work():
        rig.go()
    rig.check(request)


def test_what_prompts_may_take_follows_from_all_that_decode() -> None:
    """Four decode, two in each step, and three wait, two behind the first: a step of two tokens may take six times as
    long, where a token costs 1. Half of those that decode would make it ten times."""
    pace = Pace(factor=2.0, weights_s=0.0, token_s=1.0, cached_s=0.0, pair_s=0.0, waiting_weight=8.0, min_tokens=1)
    rig = Pipeline(2, pace=pace, enable_prefix_caching=False)
    for i in range(4):
        rig.submit(str(i), [i + 1] * 5, 60)
    for _ in range(12):
        rig.go()
    for name in "abc":
        rig.submit(name, [9] * 20, 2)
    found = [plan for plan, _ in (rig.go() for _ in range(2)) if plan is not None]
    assert len(found[0].spans) == 3 and sum(found[0].spans.lengths) == 12
    while rig.scheduler.has_work():
        rig.go()
