"""The option that makes the state machine look longer."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--machine-examples", default=None, help="examples of the scheduler's state machine (default 250)")
