"""The state machine catches every bug of `bugs.py` and `draft_bugs.py` within the examples that a usual run has."""

from __future__ import annotations

import draft_bugs
import pytest
from bugs import BUGS, Bug
from control_machine import SchedulerMachine
from hypothesis.stateful import run_state_machine_as_test
from machine_settings import machine_settings

from quire.core.errors import EngineError


@pytest.mark.parametrize("bug", BUGS + draft_bugs.BUGS, ids=lambda bug: bug.__name__)
def test_bug_is_caught(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    bug(monkeypatch)
    with pytest.raises((AssertionError, EngineError)):
        run_state_machine_as_test(SchedulerMachine, settings=machine_settings(1000, deep=False))
