"""The state machine catches every bug of `bugs.py`, `draft_bugs.py` and `group_bugs.py`: most in short runs, rare ones
in a run that is written down, else in a long one."""

from __future__ import annotations

from collections.abc import Callable

import bugs
import draft_bugs
import group_bugs
import pytest
from bugs import BUGS, Bug
from control_machine import SchedulerMachine
from control_model import layout_of
from hypothesis import seed
from hypothesis.internal.conjecture import providers
from hypothesis.stateful import run_state_machine_as_test
from machine_settings import machine_settings

from quire.control.config import SchedulerConfig
from quire.core.errors import EngineError
from quire.core.request import Request
from quire.core.sampling import SamplingParams

SEEDS = (6, 0, 4, 1, 11)
"""They show all bugs early, where `same_examples`."""


@pytest.fixture
def same_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a seed, whatever was run before: Hypothesis draws also constants of the modules that are loaded."""
    monkeypatch.setattr(providers, "_get_local_constants", providers.Constants)
    monkeypatch.setattr(providers, "CONSTANTS_CACHE", type(providers.CONSTANTS_CACHE)(1024))


def room_for_one_whose_token_is_in_flight(machine: SchedulerMachine) -> None:
    """The second of two is sent back for want of pages; the first is cancelled before the second's last token came."""
    machine.build(
        SchedulerConfig(
            n_pages=16, kv=layout_of(0), page_size=1, max_num_seqs=2, max_num_batched_tokens=22, max_model_len=40,
            enable_prefix_caching=False, pipeline_depth=3, min_shared_tokens=1,
        )
    )  # fmt: skip
    asked = {"request_id": "", "prompt_token_ids": [1, 2, 1], "params": SamplingParams(), "max_tokens": 12, "seed": 0}
    machine.submit([Request(**asked) for _ in range(2)])
    while not machine.scheduler.live.preemptions:
        if len(machine.in_flight) == machine.config.pipeline_depth:
            machine.commit()
        machine.schedule()
        machine.check()
    first = machine.scheduler.live.running[0].request.request_id
    machine.scheduler.cancel(first)
    machine.ledger.end(first)
    machine.schedule()
    machine.check()
    machine.teardown()


WRITTEN = {bugs.preempted_resumes_before_its_token_came: room_for_one_whose_token_is_in_flight}
"""Runs for bugs that chance meets once in a thousand runs."""


@pytest.mark.parametrize("bug", BUGS + draft_bugs.BUGS + group_bugs.BUGS, ids=lambda bug: bug.__name__)
@pytest.mark.usefixtures("same_examples")
def test_bug_is_caught(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    bug(monkeypatch)
    with pytest.raises((AssertionError, EngineError, ValueError)):  # lists that differ in length end a step, too
        if bug in WRITTEN:
            WRITTEN[bug](SchedulerMachine())
            return
        for number in SEEDS:
            short = seed(number)(type("Machine", (SchedulerMachine,), {}))
            run_state_machine_as_test(short, settings=machine_settings(40, deep=False))
        run_state_machine_as_test(SchedulerMachine, settings=machine_settings(3000, deep=False))


@pytest.mark.parametrize("run", WRITTEN.values(), ids=lambda run: run.__name__)
def test_written_runs_pass_without_a_bug(run: Callable[[SchedulerMachine], None]) -> None:
    run(SchedulerMachine())
