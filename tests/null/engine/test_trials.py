"""Finding the request that ends engines, played through with an engine that is only a list: who is tried when, what a
death tells, how many deaths and how long it takes."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest

from quire.core.clock import VirtualClock
from quire.core.commands import Submit
from quire.core.errors import RequestQuarantined
from quire.core.events import EndKind, EngineEnd, FinishReason, SeqDelta, Working
from quire.core.request import Request
from quire.core.sampling import SamplingParams
from quire.engine.quarantine import MARGIN_TOKENS, MEMORY_S, Quarantine, fingerprint
from quire.engine.trials import ALONE_S, FEW, GATHER_S, Trials

STEP_S = 0.02
MAX_TOKENS = 200


def request(number: int, n: int = 1) -> Request:
    params = SamplingParams(n=n, seed=1)
    return Request(request_id=f"r{number}", prompt_token_ids=[number, 7], params=params, max_tokens=MAX_TOKENS, seed=1)


@dataclasses.dataclass
class World:
    """A client's books, and engines one after the other. Step after step every request in the core makes a token."""

    guilty: dict[int, int]
    """Number of a request → output tokens before the engine dies of it."""
    kind: EndKind = EndKind.CRASH
    max_restarts: int = 3
    n_slots: int = 256
    clock: VirtualClock = dataclasses.field(default_factory=VirtualClock)
    made: dict[str, int] = dataclasses.field(default_factory=dict)
    open: dict[str, Request] = dataclasses.field(default_factory=dict)
    refused: set[str] = dataclasses.field(default_factory=set)
    done: dict[str, float] = dataclasses.field(default_factory=dict)
    n_deaths: int = 0
    outside_s: list[float] = dataclasses.field(default_factory=list)
    """When somebody kills the engine."""

    def __post_init__(self) -> None:
        self.quarantine = Quarantine(self.clock)
        self.core: list[str] = []
        self.trials = Trials(self.max_restarts, self.clock.now_s(), after_death=False)
        self.longest_hold_s = 0.0
        self._held_since: float | None = None

    def submit(self, *numbers: int) -> None:
        for number in numbers:
            one = request(number)
            try:
                trial = self.quarantine.check(one)
            except RequestQuarantined:
                self.refused.add(one.request_id)
                continue
            self.open[one.request_id] = one
            self._take(Submit(one, trial))

    def _take(self, submit: Submit) -> None:
        self.made[submit.request.request_id] = 0
        if self.trials.take(submit, self.clock.now_s()):
            self.core.append(submit.request.request_id)

    def step(self) -> None:
        self.clock.advance(STEP_S)
        now_s = self.clock.now_s()
        self.core += [submit.request.request_id for submit in self.trials.due(now_s)]
        running = self.core[: self.n_slots]
        fatal = [name for name in running if self.made[name] >= self.guilty.get(int(name[1:]), math.inf)]
        if fatal or (self.outside_s and now_s >= self.outside_s[0]):
            if not fatal:
                self.outside_s.pop(0)
            self.die(running, self.kind if fatal else EndKind.KILLED)
            return
        deltas = []
        for name in running:
            self.made[name] += 1
            is_end = self.made[name] == MAX_TOKENS
            deltas.append(SeqDelta(name, 0, [1], FinishReason.LENGTH if is_end else None))
            trial = self.quarantine.check(self.open[name])
            if trial is not None and (self.made[name] >= trial.n_tokens or is_end):
                self.quarantine.acquit(self.open[name])
            if is_end:
                self.done[name] = now_s
                del self.open[name]
        self.core = [name for name in self.core if name in self.open]
        self.trials.note(deltas)

    def die(self, running: list[str], kind: EndKind) -> None:
        working = [
            Working(name, fingerprint(self.open[name]), self.made[name], self.trials.stage_of(name)) for name in running
        ]
        self.quarantine.learn([EngineEnd(self.n_deaths, kind, working)])
        self.n_deaths += 1
        assert self.n_deaths <= self.max_restarts, "the server gives up"
        self.clock.advance(5.0)
        self.core = []
        left = self.max_restarts - self.n_deaths
        self.trials = Trials(left, self.clock.now_s(), after_death=bool(working))
        numbers = [int(name[1:]) for name in self.open]
        self.open = {}
        self.submit(*numbers)

    def run(self, limit_s: float = 3600) -> None:
        end_s = self.clock.now_s() + limit_s
        while self.open:
            assert self.clock.now_s() < end_s, f"{len(self.open)} requests are still open"
            self.step()


@pytest.mark.parametrize(
    ("kind", "n", "at"),
    [
        (kind, n, at)
        for kind in (EndKind.CRASH, EndKind.STALL, EndKind.KILLED)
        for n in (1, 4, 9, 100, 256)
        for at in (0, 3, 150)
        # Kills among many are not told from kills that come from outside in three deaths, when trials take long.
        if kind is not EndKind.KILLED or n <= FEW or (n <= 100 and at <= 3)
    ],
)
def test_the_guilty_is_found_in_time(kind: EndKind, n: int, at: int) -> None:
    """Whatever the order: all innocents end, the guilty is refused, the engine dies no more often than it may."""
    for seed in range(2):
        guilty = random.Random(seed).randrange(n)
        world = World({guilty: at}, kind)
        world.submit(*range(n))
        world.run()
        assert world.refused == {f"r{guilty}"} and len(world.done) == n - 1
        assert world.n_deaths <= 3
        if n <= FEW or (n <= 100 and at <= 3):
            assert world.n_deaths == (3 if kind is EndKind.KILLED else 2)


def test_hundreds_of_suspects_do_not_take_for_ever() -> None:
    """One by one they would take 256 times 150 steps, 770 s: they take the time alone, and 16 groups or so."""
    world = World({})
    world.outside_s = [150 * STEP_S]
    world.submit(*range(256))
    world.run()
    assert len(world.done) == 256 and not world.refused and world.n_deaths == 1
    group_s = (150 + MARGIN_TOKENS + 3) * STEP_S
    assert max(world.done.values()) < 5.0 + ALONE_S + 18 * group_s + MAX_TOKENS * STEP_S


def test_others_wait_for_trials_only_so_long() -> None:
    world = World({200: 140})
    world.submit(*range(256))
    while not world.n_deaths:
        world.step()
    before_s = world.clock.now_s()
    world.submit(1000)
    world.run()
    assert world.refused == {"r200"} and world.n_deaths <= 3
    waited_s = world.done["r1000"] - before_s - MAX_TOKENS * STEP_S
    assert waited_s < world.n_deaths * (5.0 + ALONE_S + GATHER_S + 4)


@pytest.mark.parametrize("seed", range(8))
def test_kills_from_outside_convict_nobody(seed: int) -> None:
    rng = random.Random(seed)
    world = World({}, max_restarts=8)
    times_s = [1.0]
    for _ in range(7):
        times_s.append(times_s[-1] + rng.choice([0.3, 1.0, 3.0, 10.0]) + 5.0)
    world.outside_s = times_s
    world.submit(*range(400))
    world.run()
    assert not world.refused and len(world.done) == 400 and world.n_deaths == 8


def test_kills_as_soon_as_it_runs_convict_nobody() -> None:
    """Each time that the first suspect has been alone for a moment: the next one is another."""
    world = World({}, max_restarts=20)
    world.outside_s = [1.0 + number * (5.0 + GATHER_S + 0.1) for number in range(20)]
    world.submit(*range(30))
    world.run()
    assert not world.refused and len(world.done) == 30


def test_two_that_are_guilty_among_few() -> None:
    world = World({2: 0, 5: 7})
    world.submit(*range(8))
    world.run()
    assert world.refused == {"r2", "r5"} and world.n_deaths == 3 and len(world.done) == 6


def test_what_only_waited_is_no_suspect() -> None:
    world = World({0: 3}, n_slots=4)
    world.submit(*range(50))
    while not world.n_deaths:
        world.step()
    suspects = [name for name, one in world.open.items() if world.quarantine.check(one) is not None]
    assert suspects == ["r0", "r1", "r2", "r3"]


def test_a_suspicion_and_a_conviction_are_forgotten_in_time() -> None:
    clock = VirtualClock()
    quarantine = Quarantine(clock)
    one = request(1)
    for number in range(2):
        quarantine.learn([EngineEnd(number, EndKind.CRASH, [Working("r1", fingerprint(one), 3, stage=number)])])
    with pytest.raises(RequestQuarantined, match="died 2 times"):
        quarantine.check(one)
    clock.advance(MEMORY_S + 1)
    assert quarantine.check(one) is None


def test_a_death_is_learnt_once_and_the_same_by_every_process() -> None:
    clock = VirtualClock()
    ends = [
        EngineEnd(0, EndKind.KILLED, [Working("r1", fingerprint(request(1)), 3), Working("r2", b"other", 9)]),
        EngineEnd(1, EndKind.FAILED, [Working("r4", fingerprint(request(4)), 3)]),
        EngineEnd(2, EndKind.KILLED, [Working("r1", fingerprint(request(1)), 3, stage=1)]),
    ]
    early, late = Quarantine(clock), Quarantine(clock)
    for end in ends:
        early.learn([end])
        early.learn(ends[: end.engine + 1])
    late.learn(ends)
    assert early._known == late._known
    trial = late.check(request(1))
    assert trial is not None and trial.n_tokens == 3 + MARGIN_TOKENS
    assert late.check(request(4)) is None, "an engine that gives up has answered all"


def test_several_sequences_come_through_one_by_one_and_a_cancelled_suspect_is_gone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    trials = Trials(3, 0.0, after_death=False)
    quarantine = Quarantine(VirtualClock())
    first, second = request(1, n=2), request(2)
    for one in (first, second):
        quarantine.learn([EngineEnd(len(quarantine._known), EndKind.CRASH, [Working("x", fingerprint(one), 0)])])
        trial = quarantine.check(one)
        assert trial is not None and not trials.take(Submit(one, trial), 0.0)
    assert not trials.take(Submit(request(3)), 0.0) and trials.n_waiting == 4
    [started] = trials.due(0.0)
    assert started.request is first and trials.stage_of("r1") == 1
    trials.note([SeqDelta("r1", 0, [1] * MARGIN_TOKENS)])
    assert trials.due(0.1) == [] and trials.stage_of("r1") == 1, "its other sequence is not through"
    trials.drop_seq("r1", 1)
    assert [one.request.request_id for one in trials.due(0.2)] == ["r2"]
    trials.drop(["r2", "r3"])
    assert trials.due(0.3) == [] and trials.n_waiting == 0 and trials.stage_of("r1") == 2
    assert trials.take(Submit(request(4)), 0.4)
    [said] = caplog.messages
    assert said.endswith("computed them: 2 requests, one at a time; others wait for them, at most 20 s")
