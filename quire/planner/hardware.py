"""What machines can do at best, by name. Owns recorded ceilings; does not probe any machine (`bench/ceilings.py` does).

Sources: benchmarks/ and the reports of kernel benchmarks on these machines; a ceiling is what a plain large copy or
matrix product reaches, not the data sheet.
"""

from __future__ import annotations

import dataclasses
from typing import Final

from quire.core.errors import ConfigError


@dataclasses.dataclass(frozen=True, slots=True)
class Hardware:
    """Ceilings of one device."""

    name: str
    bandwidth_bytes_per_s: float
    """Memory traffic of a large copy; where it was probed, of large reads."""
    flops_per_s: float
    """Dense matrix product in the weights' type, multiply and add counted as two."""
    step_overhead_s: float
    """Host work and launches of a step that nothing hides."""


HARDWARE: Final = {
    "h200": Hardware("h200", 4.3e12, 790e12, 100e-6),
    "cpu": Hardware("cpu", 45e9, 0.9e12, 200e-6),
}
"""Name → ceilings. `cpu` stands for a generic two-core machine with AVX-512 and bfloat16."""


def hardware_named(name: str) -> Hardware:
    """The ceilings of a known machine (ConfigError with the known names otherwise)."""
    if name not in HARDWARE:
        raise ConfigError(f"hardware {name!r} is unknown: choose one of {', '.join(sorted(HARDWARE))}")
    return HARDWARE[name]
