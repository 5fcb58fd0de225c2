"""The state machine itself. More examples: `pytest tests/null/control --machine-examples=3000`."""

from __future__ import annotations

import pytest
from control_machine import SchedulerMachine
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test


def machine_settings(n_examples: int, *, deep: bool) -> settings:
    """Deterministic as a rule; `deep` runs look elsewhere each time, and shrink what they find."""
    return settings(
        max_examples=n_examples, stateful_step_count=30, deadline=None, database=None, derandomize=not deep,
        suppress_health_check=list(HealthCheck), report_multiple_bugs=False,
        phases=[Phase.generate, Phase.shrink] if deep else [Phase.generate],
    )  # fmt: skip


def test_scheduler_keeps_its_invariants(pytestconfig: pytest.Config) -> None:
    n_examples = pytestconfig.getoption("--machine-examples", default=None)
    run_state_machine_as_test(
        SchedulerMachine, settings=machine_settings(int(n_examples or 250), deep=n_examples is not None)
    )
