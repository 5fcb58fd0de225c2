"""Large numbers as people write them: parse '4M', '15T' or '1e24'; print '7.03B'. For bytes: `units`."""

from __future__ import annotations

import re
from typing import Final

from quire.core.errors import ConfigError, shown

POWERS: Final = {"": 0, "k": 1, "m": 2, "b": 3, "g": 3, "t": 4, "p": 5, "e": 6}
MOST: Final = 1e30
"""That is asked for. Nobody has more of anything here, and what follows from it is still a number."""
_COUNT: Final = re.compile(
    r"^\s*([+-]?(?:\d{1,3}(?:,\d{3})+|\d[\d_]*)(?:\.\d*)?(?:e[+-]?\d+)?)\s*([kmbgtpe]?)\s*$", re.IGNORECASE
)
"""A comma is between thousands: 1,5T is none of 15T."""


def parse_count(text: str, what: str = "this", *, least: float = 0.0, most: float = MOST) -> float:
    """A number above 0: '4096', '4M', '1.5T', '1e24', '2_000_000', '2,000,000'. ConfigError otherwise, and for one
    below `least` or above `most`, which names `what`."""
    match = _COUNT.match(text)
    if match is None:
        raise ConfigError(f"{what} {shown(text)} is not a number: write one as 4096, 4M, 1.5T or 1e24")
    digits, power = match.groups()
    value = float(digits.replace(",", "").replace("_", "")) * 1000.0 ** POWERS[power.lower()]
    if not value > 0:
        raise ConfigError(f"{what} {shown(text)} is out of range: give a number above 0")
    if not least <= value <= most:
        bound = f"at most {most:g}" if value > most else f"at least {least:g}"
        raise ConfigError(f"{what} {shown(text)} is out of range: {bound}")
    return value


def format_count(value: float) -> str:
    """'7.03B', three digits; from 1000T on as '1.00e+16'."""
    for name, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= 0.9995 * size:
            return f"{_three(value / size)}{name}" if abs(value) < 999.5e12 else f"{value:.2e}"
    return _three(value)


def format_whole(value: float) -> str:
    """'461,596'; below 100, and from 10^15 on, three digits: '0.5', '1e+30'."""
    return f"{value:,.0f}" if 99.5 <= value < 1e15 else f"{value:.3g}"


def _three(value: float) -> str:
    n_decimals = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{n_decimals}f}"
