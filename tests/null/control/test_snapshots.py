"""Snapshots of recurrent states: every span begins with the state of exactly the tokens before it, whatever happens."""

from __future__ import annotations

import random

import pytest
from kept_states import KeepsStates, States, check_places, n_free
from test_scheduler_cases import VOCAB, Rig

from quire.control import snapshots
from quire.control.snapshots import Snapshots
from quire.core.beams import BeamTerms
from quire.core.errors import ConfigError, InvalidParameter
from quire.core.events import FinishReason
from quire.core.failure import Code
from quire.core.plan import StepPlan
from quire.core.sampling import SamplingParams
from quire.engine.executors.null import NullExecutor

EVERY = 8


class StatefulDevice(KeepsStates, NullExecutor):
    """The null device with recurrent states."""

    fails = False
    """The first span of the next step does, as if a state were no number."""

    def fault(self, plan: StepPlan, row: int) -> Code | None:
        return Code.NON_FINITE_LOGITS if self.fails and row == 0 else None


class StateRig(Rig):
    """Of a model with states."""

    def __init__(self, **limits: object) -> None:
        super().__init__(**{"has_states": True, "n_snapshots": 6, **limits})
        self.device.__class__ = StatefulDevice
        self.device.states = States()

    @property
    def cache(self) -> Snapshots:
        found = self.scheduler.live.cache.snapshots
        assert found is not None
        return found

    @property
    def n_free(self) -> int:
        return n_free(self.cache)

    def check_places(self) -> None:
        check_places(self.scheduler.live.cache, self.scheduler.live.running)


@pytest.fixture(autouse=True)
def near(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "EVERY_TOKENS", EVERY)


def prompt(n: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=n)


def test_a_prompt_goes_on_from_the_longest_prefix_that_has_a_state() -> None:
    rig = StateRig()
    rig.submit("a", prompt(22))
    rig.run()
    plan = None
    for name, tail, cached in (("same", [], 20), ("longer", [1, 2, 3], 20)):
        rig.submit(name, prompt(22) + tail)
        plan = rig.turn()
        assert plan.spans.starts == [cached] and len(plan.restores) == 1
        rig.run()
    rig.submit("branch", [*prompt(14), 1, 2, 3, 4])
    plan = rig.turn()
    assert plan.spans.starts == [8]  # every 8 tokens there is one; the tree has 12 in common with it
    assert {one.n_tokens for one in plan.saves} == {12, 16}
    rig.run()
    rig.submit("again", [*prompt(14), 4, 3, 2, 1])
    assert rig.turn().spans.starts == [12]
    rig.run()
    rig.check_places()


def test_who_comes_in_the_step_that_takes_a_snapshot_waits_for_it() -> None:
    rig = StateRig()
    for name in "abc":
        rig.submit(name, [*prompt(20), ord(name) % 7])
    assert rig.turn().spans.starts == [0]
    plan = rig.turn()
    assert sorted(plan.spans.starts) == [20, 20, 21] and len(plan.restores) == 2
    rig.run()


def test_samples_enter_from_the_state_of_their_prompt() -> None:
    rig = StateRig()
    request = rig.submit("n", prompt(22), n=3)
    first = rig.turn()
    assert first.spans.starts == [0] and not first.copies
    assert rig.turn().spans.starts[1:] == [20, 20]
    rig.run()
    rig.check(request)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("n_snapshots", [1, 5, 40])
def test_any_traffic(depth: int, n_snapshots: int) -> None:
    """Shared prefixes, preemption (few pages), cancellations, salts, samples, eviction of snapshots."""
    chance = random.Random(n_snapshots * 10 + depth)
    rig = StateRig(n_pages=26, pipeline_depth=depth, n_snapshots=n_snapshots, max_num_batched_tokens=24, max_num_seqs=6)
    requests, n_hits = [], 0
    for number in range(150):
        base = prompt(40, chance.randrange(2))
        tokens = base[: chance.randrange(1, 40)] + prompt(chance.randrange(5), number)
        params = SamplingParams(n=chance.choice((1, 1, 3)))
        salt = chance.choice(("", "x"))
        requests.append(rig.submit(str(number), tokens, chance.randrange(1, 12), params=params, cache_salt=salt))
        for _ in range(chance.randrange(4)):
            if len(rig.results) < depth and (plan := rig.scheduler.schedule()) is not None:
                n_hits += len(plan.restores)
                rig.results.append(rig.device.submit(plan).result())
            elif rig.results:
                rig.commit()
        if chance.random() < 0.1:
            rig.scheduler.cancel(requests.pop(chance.randrange(len(requests))).request_id)
        rig.check_places()
    while rig.scheduler.has_work():
        if len(rig.results) < depth and (plan := rig.scheduler.schedule()) is not None:
            rig.results.append(rig.device.submit(plan).result())
        else:
            rig.commit()
    for request in requests:
        rig.check(request)
    assert n_hits > 5 and rig.scheduler.stats().preemptions > 0
    assert rig.scheduler.forget_prefixes() and not rig.cache.n_used


def test_a_snapshot_goes_with_its_page_and_the_oldest_goes_first() -> None:
    rig = StateRig(n_snapshots=2)
    for seed in (1, 2):
        rig.submit(str(seed), prompt(9, seed), 1)
        rig.run()
    rig.submit("used", prompt(9, 1), 1)
    assert rig.turn().spans.starts == [8]
    rig.submit("new", prompt(9, 3), 1)
    rig.run()
    for seed, start in ((1, 8), (2, 0)):
        rig.submit(f"again {seed}", prompt(9, seed), 1)
        assert rig.turn().spans.starts == [start]
    rig.check_places()


def test_states_of_a_sequence_that_failed_are_of_no_use() -> None:
    """Its pages were private: the tree had the same tokens. So its snapshot is at a node of another sequence."""
    rig = StateRig()
    rig.submit("a", prompt(22))
    rig.run()
    rig.submit("b", [*prompt(14), 1, 2, 3, 4])
    assert {one.n_tokens for one in rig.turn().saves} == {12, 16}
    rig.device.fails = True
    rig.turn()
    rig.device.fails = False
    assert rig.ends["b", 0] is FinishReason.ERROR
    rig.submit("again", [*prompt(14), 4, 3, 2, 1])
    assert rig.turn().spans.starts == [0]
    rig.check_places()
    rig.run()


def test_without_room_for_snapshots_nothing_is_kept() -> None:
    rig = StateRig(n_snapshots=0)
    for name in "ab":
        rig.submit(name, prompt(22))
        rig.run()
        assert rig.scheduler.live.cache.tree.n_pages == 0


def test_what_leaves_a_trace_in_states_is_refused() -> None:
    with pytest.raises(ConfigError, match="drafts"):
        StateRig(num_speculative_tokens=2)
    with pytest.raises(InvalidParameter, match="recurrent states"):
        StateRig().submit("beams", [1, 2], beams=BeamTerms(2))
