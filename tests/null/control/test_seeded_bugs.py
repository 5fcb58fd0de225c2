"""The state machine catches every bug of `bugs.py` and `draft_bugs.py`, most in short runs, all in a long one."""

from __future__ import annotations

import draft_bugs
import group_bugs
import pytest
from bugs import BUGS, Bug
from control_machine import SchedulerMachine
from hypothesis import seed
from hypothesis.stateful import run_state_machine_as_test
from machine_settings import machine_settings

from quire.core.errors import EngineError

SEEDS = (13, 3, 11, 21, 27)
"""They show most bugs early. Which examples a seed makes depends also on the modules that are loaded."""


@pytest.mark.parametrize("bug", BUGS + draft_bugs.BUGS + group_bugs.BUGS, ids=lambda bug: bug.__name__)
def test_bug_is_caught(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    bug(monkeypatch)
    with pytest.raises((AssertionError, EngineError)):
        for number in SEEDS:
            short = seed(number)(type("Machine", (SchedulerMachine,), {}))
            run_state_machine_as_test(short, settings=machine_settings(40, deep=False))
        run_state_machine_as_test(SchedulerMachine, settings=machine_settings(3000, deep=False))
