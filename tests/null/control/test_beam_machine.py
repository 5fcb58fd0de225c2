"""The state machine of the scheduler with beam searches among the requests, and bugs of beams that it must catch."""

from __future__ import annotations

import dataclasses

import beam_bugs
import hypothesis.strategies as st
import pytest
from beam_model import BeamLedger
from bugs import Bug
from control_machine import SchedulerMachine, any_requests, configs, prompts
from hypothesis import seed
from hypothesis.stateful import initialize, rule, run_state_machine_as_test
from machine_settings import machine_settings
from test_seeded_bugs import SEEDS

from quire.control.config import SchedulerConfig
from quire.core.beams import BeamTerms
from quire.core.errors import EngineError
from quire.core.request import Request, Terms
from quire.core.sampling import SamplingParams

searches = st.builds(
    lambda prompt, width, n, penalty, early, max_tokens, end, salt, priority, logprobs, terms: Request(
        request_id="", prompt_token_ids=prompt, params=SamplingParams(n=min(n, width), logprobs=logprobs),
        beams=BeamTerms(width, penalty, early), max_tokens=max_tokens, seed=0, end_token_ids=end, priority=priority,
        cache_salt=salt, terms=terms,
    ),
    prompts, st.sampled_from([1, 2, 2, 3, 3]), st.sampled_from([1, 2, 3]), st.sampled_from([0.0, 1.0, 2.0, -1.0]),
    st.sampled_from([False, True, "never"]), st.integers(1, 10), st.sampled_from([[], [5], [5]]),
    st.sampled_from(["", "", "b"]), st.integers(0, 2), st.sampled_from([None, 0, 2]),
    st.sampled_from([Terms(), Terms(), Terms(user="u"), Terms(tenant="t")]),
)  # fmt: skip


roomy = st.builds(
    lambda config, pages, seqs: dataclasses.replace(
        config, n_pages=pages * len(config.kv.windows) + 1, max_num_seqs=seqs, max_num_batched_tokens=seqs + 8
    ),
    configs, st.integers(10, 24), st.integers(4, 8),
)  # fmt: skip
"""Where searches run beside each other; in most of the others they are refused, or alone."""


class BeamMachine(SchedulerMachine):
    """See the module."""

    @initialize(config=st.one_of(configs, roomy, roomy))
    def build(self, config: SchedulerConfig) -> None:
        super().build(config)
        self.ledger = BeamLedger(config.kv.windows)

    @rule(burst=st.lists(st.one_of(searches, searches, any_requests), min_size=1, max_size=4))
    def submit_beams(self, burst: list[Request]) -> None:
        for request in burst:
            self._submit(request)

    @rule(go=st.sampled_from([False, False, True]))
    def retry_all(self, go: bool) -> None:
        """The device had too little memory: everything computes again."""
        if not go or not self.in_flight:
            return
        self.keeps_order = False
        for delta in self.scheduler.retry_all():
            self.ledger.hear(delta, may_fail=True)
        while self.in_flight:
            assert self.scheduler.commit(self.in_flight.popleft()[2]) == []


def test_beams_keep_the_invariants(pytestconfig: pytest.Config) -> None:
    n_examples = pytestconfig.getoption("--machine-examples", default=None)
    deep = n_examples is not None
    run_state_machine_as_test(BeamMachine, settings=machine_settings(int(n_examples or 140), deep=deep))


@pytest.mark.parametrize("bug", beam_bugs.BUGS, ids=lambda bug: bug.__name__)
def test_bug_of_beams_is_caught(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    bug(monkeypatch)
    with pytest.raises((AssertionError, EngineError)):
        for number in SEEDS:
            short = seed(number)(type("Machine", (BeamMachine,), {}))
            run_state_machine_as_test(short, settings=machine_settings(60, deep=False))
        run_state_machine_as_test(BeamMachine, settings=machine_settings(1000, deep=False))
