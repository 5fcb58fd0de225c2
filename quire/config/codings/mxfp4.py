"""MXFP4: numbers of 4 bits (e2m1) with a power of two for each 32 inputs, as gpt-oss stores its experts."""

from __future__ import annotations

from quire.config.codings.coding import Coding, Codings, Layout, Rule
from quire.config.fields import Fields

GROUP = 32


def read(fields: Fields) -> Codings:
    """Raises ConfigError."""
    return Codings(method="MXFP4", rules=(Rule(Coding(layout=Layout.MXFP4, bits=4, group=GROUP, is_float=True)),))
