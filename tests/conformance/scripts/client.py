"""What every script here shares: where the server is, the questions, a tool, and how results are given back.

A script is run by the Python of its client's environment, with the server's address as its only argument; the last line
that it writes is a JSON object, which the test judges.
"""

from __future__ import annotations

import json
import sys
from typing import Any

BASE = sys.argv[1]
V1 = BASE + "/v1"
MODEL = "demo"
KEY = "none"
SUM = "What is 23 + 45?"
WEATHER = "What is the weather in Paris?"
LIMIT = 60
CALLED: list[str] = []
"""Cities that the tool was asked for."""


def get_weather(city: str) -> str:
    """Get the weather of a city.

    Args:
        city: The city.
    """
    CALLED.append(city)
    return "clear, 21 degrees"


def called() -> list[str]:
    """The cities since the last time."""
    found = CALLED[:]
    CALLED.clear()
    return found


def give(results: dict[str, Any]) -> None:
    """The last line."""
    print("\n" + json.dumps(results), flush=True)
