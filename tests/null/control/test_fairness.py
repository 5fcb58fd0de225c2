"""Tenants share the queue by tokens, and so do the users of each: a flood of one does not delay another; and time
limits of requests."""

from __future__ import annotations

import random

import pytest

from quire.control.config import SchedulerConfig
from quire.control.queue import QUANTUM, WaitQueue
from quire.control.scheduler import Scheduler
from quire.control.seq import Seq
from quire.control.slot_params import slot_params
from quire.core.clock import VirtualClock
from quire.core.events import FinishReason
from quire.core.failure import Code
from quire.core.request import Request, Terms
from quire.core.result import StepResult
from quire.core.sampling import SamplingParams


def request(name: str, prompt_len: int = 4, **terms: object) -> Request:
    return Request(
        request_id=name, prompt_token_ids=[1] * prompt_len, params=SamplingParams(), max_tokens=4, seed=0,
        terms=Terms(**terms),  # type: ignore[arg-type]
    )  # fmt: skip


def seq(tenant: str, arrival: int, prompt_len: int = 100, priority: int = 0, user: str = "") -> Seq:
    one = request(f"{tenant}{arrival}", prompt_len, tenant=tenant, user=user)
    return Seq(one, 0, (priority, arrival, 0), slot_params(one, 0))


def drained(queue: WaitQueue) -> list[str]:
    return [queue.pop().request.terms.tenant for _ in range(len(queue))]


def test_a_flood_of_one_tenant_does_not_delay_another() -> None:
    queue = WaitQueue()
    for i in range(1000):
        queue.push(seq("flood", i, 500))
    queue.push(seq("quiet", 1000, 500))
    order = drained(queue)
    assert order.index("quiet") <= -(-QUANTUM // 500) + 1


def test_shares_are_of_tokens_not_of_requests() -> None:
    queue = WaitQueue()
    for i in range(400):
        queue.push(seq("long", i, 3000))
        queue.push(seq("short", i, 100))
    taken = {"long": 0, "short": 0}
    for _ in range(200):
        one = queue.pop()
        taken[one.request.terms.tenant] += one.prompt_len
    assert abs(taken["long"] - taken["short"]) <= 3000 + QUANTUM


def test_output_is_paid_for() -> None:
    queue = WaitQueue()
    for i in range(100):
        queue.push(seq("talker", i))
        queue.push(seq("other", 100 + i))
    first = queue.pop()
    assert first.request.terms.tenant == "talker"
    first.tokens = [1] * (100 + 40 * QUANTUM)
    queue.charge(first)
    assert drained(queue)[:100] == ["other"] * 100


def test_a_user_with_one_request_does_not_starve_behind_one_with_many() -> None:
    queue = WaitQueue()
    for i in range(50):
        queue.push(seq("team", i, 500, user="many"))
    queue.push(seq("team", 50, 500, user="one"))
    users = [queue.pop().request.terms.user for _ in range(len(queue))]
    assert users.index("one") <= -(-QUANTUM // 500) + 1


@pytest.mark.parametrize("n_out", [4, 60])
def test_one_request_beside_fifty_of_another_user(n_out: int) -> None:
    """Through the scheduler, with a single slot: short answers and long ones."""
    scheduler, clock = rig()
    for i in range(51):
        one = request(f"r{i}", 8, tenant="team", user="many" if i < 50 else "one")
        one.max_tokens = n_out
        scheduler.submit(one)
    ended: list[str] = []
    while scheduler.has_work():
        plan = scheduler.schedule()
        clock.advance(0.01)
        assert plan is not None
        n_wants = sum(plan.spans.wants)
        deltas = scheduler.commit(StepResult(plan.step, [5] * n_wants, [1] * n_wants))
        ended += [delta.request_id for delta in deltas if delta.finish_reason is not None]
    assert len(ended) == 51 and ended.index("r50") <= QUANTUM // (8 + n_out) + 2


def test_many_users_do_not_make_a_tenant_larger() -> None:
    queue = WaitQueue()
    for i in range(600):
        queue.push(seq("crowd", i, 500, user=f"user{i}"))
        queue.push(seq("alone", i, 500))
    taken = drained(queue)[:600]
    assert abs(taken.count("crowd") - taken.count("alone")) <= -(-QUANTUM // 500) + 1


@pytest.mark.parametrize("level", ["tenant", "user"])
def test_what_was_used_while_nobody_else_waited_is_no_debt(level: str) -> None:
    def one(name: str, arrival: int) -> Seq:
        return seq(name, arrival, 500) if level == "tenant" else seq("team", arrival, 500, user=name)

    queue = WaitQueue()
    for i in range(1100):
        queue.push(one("early", i))
    for _ in range(1000):
        queue.charge(queue.pop())
    for i in range(100):
        queue.push(one("late", 1100 + i))
    names = [getattr(queue.pop().request.terms, level) for _ in range(100)]
    assert 40 <= names.count("early") <= 60


def test_the_head_stays_until_it_is_popped_and_priorities_come_first() -> None:
    rng, queue = random.Random(5), WaitQueue()
    live: list[Seq] = []
    for arrival in range(3000):
        if rng.random() < 0.55 or not live:
            one = seq(rng.choice("abc"), arrival, rng.choice([3, 700, 5000]), rng.choice([0, 1]), rng.choice("xy"))
            queue.push(one, returned=rng.random() < 0.2)
            live.append(one)
        else:
            head = queue.peek()
            assert head is queue.peek() and head is queue.pop() and head is not None
            assert head.key[0] == min(other.key[0] for other in live)
            assert head in live
            live.remove(head)
        assert len(queue) == len(live)


def test_one_tenant_is_first_come_first_served_whoever_returned() -> None:
    queue = WaitQueue()
    for i in (4, 2, 9, 1):
        queue.push(seq("", i), returned=i % 2 == 0)
    assert [queue.pop().key[1] for _ in range(4)] == [1, 2, 4, 9]


def rig() -> tuple[Scheduler, VirtualClock]:
    config = SchedulerConfig(n_pages=65, page_size=4, max_num_seqs=1, max_num_batched_tokens=16, max_model_len=128)
    clock = VirtualClock()
    return Scheduler(config, clock), clock


def test_time_limits() -> None:
    scheduler, clock = rig()
    scheduler.submit(request("runs", queue_limit_s=1, time_limit_s=5))
    assert scheduler.schedule() is not None
    scheduler.submit(request("waits", queue_limit_s=1))
    scheduler.submit(request("patient"))
    assert scheduler.expire() == []
    clock.advance(1.0)
    [late] = scheduler.expire()
    assert (late.request_id, late.finish_reason) == ("waits", FinishReason.ERROR)
    assert late.failure is not None and late.failure.code is Code.QUEUE_TIMEOUT
    clock.advance(4.0)
    [late] = scheduler.expire()
    assert late.request_id == "runs" and late.failure is not None and late.failure.code is Code.REQUEST_TIMEOUT
    assert scheduler.expire() == [] and list(scheduler.live.requests) == ["patient"]
    stats = scheduler.stats()
    assert stats.n_running == 0 and stats.n_pages_free == stats.n_pages and stats.finished["error"] == 2


def test_limits_of_ended_requests_are_forgotten() -> None:
    scheduler, _ = rig()
    for i in range(5000):
        scheduler.submit(request(f"r{i}", time_limit_s=1e6))
        scheduler.cancel(f"r{i}")
    assert len(scheduler.live.deadlines._heap) < 600


@pytest.mark.parametrize("returned", [False, True])
def test_empty_levels_and_tenants_leave_nothing(returned: bool) -> None:
    queue = WaitQueue()
    for i in range(500):
        queue.push(seq(f"tenant{i}", i, priority=i % 50, user=f"user{i % 3}"), returned=returned)
    while queue.peek() is not None:
        queue.pop()
    assert not queue._levels and not queue._priorities
