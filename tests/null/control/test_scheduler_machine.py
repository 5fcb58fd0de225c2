"""The state machine itself. More examples: `pytest tests/null/control --machine-examples=3000`."""

from __future__ import annotations

import pytest
from control_machine import SchedulerMachine
from hypothesis.stateful import run_state_machine_as_test
from machine_settings import machine_settings


def test_scheduler_keeps_its_invariants(pytestconfig: pytest.Config) -> None:
    n_examples = pytestconfig.getoption("--machine-examples", default=None)
    deep = n_examples is not None
    run_state_machine_as_test(SchedulerMachine, settings=machine_settings(int(n_examples or 200), deep=deep))
