"""MXFP4: numbers of 4 bits (e2m1) with a power of two for each 32 inputs, as gpt-oss stores its experts."""

from __future__ import annotations

from typing import Final

from quire.config.codings.coding import PATTERN, Coding, Codings, Layout, Rule
from quire.config.fields import Fields

GROUP: Final = 32
CODING: Final = Coding(layout=Layout.MXFP4, bits=4, group=GROUP, is_float=True)
NO_EXPERTS: Final = PATTERN + r"(?!.*\.experts\.)"
"""What gpt-oss leaves: all that is no matrix of an expert."""


def read(fields: Fields) -> Codings:
    """Raises ConfigError."""
    return Codings(method="MXFP4", rules=(Rule(CODING),), left=(NO_EXPERTS,))
