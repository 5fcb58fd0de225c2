"""Lines of Ray's processes as Ray 2.60 writes them: which of them a server shows."""

from __future__ import annotations

import os
import re

import pytest

from quire.engine.replicas import lines

KEPT = (
    "2026-11-28 15:39:30,413 INFO quire.engine: torch is loaded; loading demo",
    "2026-11-28 15:39:30,413 ERROR quire.engine: the replica has no engine any more: it ended 3 times",
    "WARNING 2026-11-28 15:39:55,994 controller 2435 -- Deployment 'engine' in application 'a' has 1 replicas that "
    "have taken more than 30s to be scheduled.",
    "ERROR 2026-11-28 15:39:55,994 controller 2435 -- Exception in Replica(id='o70kysoe'), it will be retried.",
    "Traceback (most recent call last):",
)
LEFT_OUT = (
    "INFO 2026-11-28 15:39:26,747 controller 2435 -- Adding 2 replicas to Deployment(name='engine', app='a').",
    "WARNING 2026-11-28 15:39:55,994 controller 2435 -- Actor for Replica(id='o70kysoe', deployment='engine', app='a') "
    "crashed, marking it unhealthy immediately.",
    "WARNING 2026-11-28 15:39:55,995 controller 2435 -- Replica Replica(id='o70kysoe', deployment='engine', app='a') "
    "failed health check, stopping it.",
    "ERROR 2026-11-28 15:39:56,022 controller 2435 -- The deployments ['engine'] are UNHEALTHY.",
    "A worker died or was killed while executing a task by an unexpected system error. To troubleshoot the problem, "
    "check the logs for the dead worker. Lease ID: 010000009d Worker ID: fdd1f2a8",
    "Task ServeController.graceful_shutdown failed. There are infinite retries remaining, so the task will be retried.",
)
SETTINGS = ("RAY_DEDUP_LOGS_SKIP_REGEX", "RAY_DEDUP_LOGS_ALLOW_REGEX", "RAY_COLOR_PREFIX")


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SETTINGS:
        monkeypatch.setenv(name, "")  # so that it is as before when the test has ended
        monkeypatch.delenv(name)


def test_lines_of_replicas_are_shown_at_once_and_internals_of_ray_are_not() -> None:
    """Ray shows at once what its first expression finds, and leaves out what the second one does."""
    lines.settle()
    skip, at_once = (re.compile(os.environ[name]) for name in SETTINGS[:2])
    assert [bool(at_once.search(line)) for line in KEPT + LEFT_OUT] == [True] * len(KEPT) + [False] * len(LEFT_OUT)
    assert all(skip.search(line) for line in LEFT_OUT)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_colours_are_for_terminals(monkeypatch: pytest.MonkeyPatch, is_terminal: bool) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setattr("sys.stderr.isatty", lambda: is_terminal)
    lines.settle()
    assert os.environ.get("RAY_COLOR_PREFIX") == (None if is_terminal else "0")


def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SETTINGS:
        monkeypatch.setenv(name, "mine")
    lines.settle()
    assert [os.environ[name] for name in SETTINGS] == ["mine"] * 3
