"""What the policy gains and loses in time, on a simulated machine with costs like those of real ones."""

from __future__ import annotations

import dataclasses
import random

import pytest

from quire.control.draft_policy import DraftPolicy
from quire.control.seen_costs import StepKind
from quire.control.seq import Seq
from quire.control.slot_params import slot_params
from quire.core.request import Request
from quire.core.sampling import SamplingParams
from quire.planner.drafts import DraftCosts

N_TOKENS = 128


@dataclasses.dataclass
class Machine:
    """Times are in plain steps of one sequence, about 0.25 ms on two cores with the demo model."""

    costs: DraftCosts
    most: int
    chance: float
    """Of a draft."""
    exposed: float
    """Of a step with drafts in a run, beyond what the start measured of rows and guesses; half of that in a step behind
    one."""
    beginning: float = 0.0
    """More, of the first one of a sequence: the drafter reads its text."""
    reading: float = 0.0
    """Of each token that the drafter has not seen."""
    prompt: int = 256
    noise: float = 0.05
    slow: float = 1.0

    def speed(self, policy: DraftPolicy, n_seqs: int, n_requests: int, rng: random.Random, step: int = 0) -> float:
        """Of requests with N_TOKENS tokens, n_seqs at once, to plain decoding."""
        took = plain = 0.0
        for _ in range(n_requests):
            request = Request(
                request_id="r", prompt_token_ids=[1, 2], params=SamplingParams(), max_tokens=N_TOKENS, seed=0
            )
            seqs = [Seq(request, 0, (0, 0, 0), slot_params(request, 0)) for _ in range(n_seqs)]
            left, read, seen = dict.fromkeys(seqs, N_TOKENS), set[Seq](), dict.fromkeys(seqs, 0)
            for seq in seqs:
                seq.planned = self.prompt
            was_drafted = False
            while left:
                live = list(left)
                asked = [seq for seq in live if seq.drafts_from <= step]
                lengths = policy.choose(asked, len(live), 4 * n_seqs, step) if asked else []
                drafted = {seq: n for seq, n in zip(asked, lengths, strict=True) if n}
                right = {
                    seq: next((i for i in range(n) if rng.random() >= self.chance), n) for seq, n in drafted.items()
                }
                n_drafted = list(drafted.values())
                seconds = self.costs.seconds(len(live) + sum(n_drafted)) + self.costs.guesses_s(n_drafted)
                seconds += self.exposed if drafted else self.exposed / 2 * was_drafted
                seconds += self.beginning * bool(drafted.keys() - read)
                seconds += self.reading * sum(seq.planned - seen[seq] for seq in drafted)
                seen |= {seq: seq.planned for seq in drafted}
                read = set(drafted)
                seconds *= self.slow * rng.uniform(1 - self.noise, 1 + self.noise)
                for seq, n in drafted.items():
                    policy.count(seq, step, n, n, right[seq], len(live))
                kind = StepKind.DRAFTED if drafted else StepKind.BEHIND if was_drafted else StepKind.PLAIN
                if policy.times(step):
                    policy.time(step, len(live), n_drafted, sum(right.values()), seconds, kind)
                took, step, was_drafted = took + seconds, step + 1, bool(drafted)
                for seq in live:
                    seq.planned += 1 + right.get(seq, 0)
                    left[seq] -= 1 + right.get(seq, 0)
                    if left[seq] <= 0:
                        del left[seq]
            plain += self.slow * N_TOKENS * self.costs.seconds(n_seqs)
        return plain / took


ONE = DraftCosts((1, 2, 4, 8), (1.0, 1.0, 1.0, 1.1), guess_s=0.02, exposed_s=(0.5,), place_s=0.2)
MANY = DraftCosts((1, 8, 32, 64, 128), (1.0, 2.0, 6.0, 12.0, 24.0), 0.01, (0.5, 1.0, 2.0), (1, 8, 32), 0.1)


def test_a_good_drafter_is_used() -> None:
    """The demo's draft model: 0.85 of 4 drafts are right. Always drafting gains 1.4, with what reading
    each text costs."""
    machine = Machine(ONE, 4, 0.85, exposed=0.6, beginning=6.0)
    rng, policy = random.Random(0), DraftPolicy(4, ONE)
    machine.speed(policy, 1, 2, rng)
    assert machine.speed(policy, 1, 20, rng, 1000) > 0.97 * machine.speed(DraftPolicy(4, None), 1, 20, random.Random(0))


@pytest.mark.parametrize("n_seqs", [1, 8, 32])
def test_drafts_that_are_never_right_cost_little(n_seqs: int) -> None:
    machine = Machine(MANY, 4, 0.0, exposed=1.0, beginning=3.0)
    rng, policy = random.Random(0), DraftPolicy(4, MANY)
    machine.speed(policy, n_seqs, 1, rng)
    assert machine.speed(policy, n_seqs, 20, rng, 1000) > 0.98


@pytest.mark.parametrize("n_seqs", [1, 8, 32])
def test_a_drafter_that_has_much_to_read_is_seldom_asked(n_seqs: int) -> None:
    """A head reads all of a text before its first guess: of short ones first, then of long ones, each of which takes it
    40 plain steps."""
    costs = dataclasses.replace(MANY, read_s=0.005)
    machine = Machine(costs, 4, 0.0, exposed=1.0, beginning=3.0, reading=0.005)
    rng, policy = random.Random(0), DraftPolicy(4, costs)
    machine.speed(policy, n_seqs, 1, rng)
    assert machine.speed(policy, n_seqs, 20, rng, 1000) > 0.98
    n_short, machine.prompt = policy.n_spans, 8192
    assert machine.speed(policy, n_seqs, 40, rng, 4000) > 0.98
    assert 0 < policy.n_spans - n_short <= 20


@pytest.mark.parametrize("n_seqs", [1, 8, 32])
def test_right_drafts_that_do_not_pay_cost_little(n_seqs: int) -> None:
    machine = Machine(MANY, 4, 0.7, exposed=4.0, beginning=3.0)
    rng, policy = random.Random(0), DraftPolicy(4, MANY)
    machine.speed(policy, n_seqs, 1, rng)
    assert machine.speed(policy, n_seqs, 20, rng, 1000) > 0.975


def test_a_good_drafter_is_used_again_when_the_machine_is_quiet() -> None:
    """For a while steps with drafts took eight times as long as others."""
    machine = Machine(ONE, 4, 0.85, exposed=0.6, beginning=6.0)
    busy = dataclasses.replace(machine, exposed=8.0, noise=0.3)
    rng, policy = random.Random(0), DraftPolicy(4, ONE)
    assert busy.speed(policy, 1, 20, rng) > 0.9
    machine.speed(policy, 1, 40, rng, 3000)
    assert machine.speed(policy, 1, 20, rng, 9000) > 0.97 * machine.speed(DraftPolicy(4, None), 1, 20, random.Random(0))
