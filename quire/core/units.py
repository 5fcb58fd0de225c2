"""Sizes and numbers of things as people write them: parse '4GiB', print '1.50 GiB' and '1 line'."""

from __future__ import annotations

import re

from quire.core.errors import ConfigError, shown

_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_SIZE = re.compile(r"^\s*(\d{1,18}(?:\.\d{1,18})?)\s*([kmgt]?)(i?)b?\s*$", re.IGNORECASE)


def parse_bytes(text: str | int, option: str = "") -> int:
    """Bytes from '512', '4GiB', '4G' (both binary with 'i' or without 'b'), '1.5GB' (decimal).

    Raises ConfigError for anything else, with the option whose value it is.
    """
    if isinstance(text, int):
        return text
    match = _SIZE.match(text)
    if match is None:
        named = f"{option} = {shown(text)}" if option else shown(text)
        raise ConfigError(
            f"{named} is not a size: write bytes, or a number with KiB, MiB, GiB, KB, MB or GB", param=option or None
        )
    number, power, binary = match.groups()
    decimal = not binary and text.strip().lower().endswith("b") and power
    return int(float(number) * (1000 if decimal else 1024) ** _POWERS[power.lower()])


def counted(n: int, noun: str) -> str:
    """`1 line`, `1,200 lines`."""
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


def format_bytes(n_bytes: float) -> str:
    """'1.50 GiB' style, binary prefixes."""
    value = float(n_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1024
    return f"{value:.2f} TiB"
