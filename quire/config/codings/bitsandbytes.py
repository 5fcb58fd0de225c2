"""bitsandbytes' NF4: 16 levels of the normal distribution in blocks of inputs (Dettmers et al., 2023)."""

from __future__ import annotations

from quire.config.codings.coding import Coding, Codings, Layout, Rule, one_of
from quire.config.fields import Fields


def read(fields: Fields) -> Codings:
    """The size of blocks stands with each matrix. Raises ConfigError."""
    for name, wanted in (("load_in_8bit", False), ("load_in_4bit", True)):
        one_of(fields, name if name in fields else f"_{name}" if f"_{name}" in fields else name, (wanted,), False)
    one_of(fields, "bnb_4bit_quant_type", ("nf4",), "fp4")
    one_of(fields, "bnb_4bit_quant_storage", ("uint8",), "uint8")
    return Codings(method="bitsandbytes", rules=(Rule(Coding(layout=Layout.NF4, bits=4, is_float=True)),))
