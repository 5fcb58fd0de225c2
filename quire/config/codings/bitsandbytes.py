"""bitsandbytes' NF4: 16 levels of the normal distribution in blocks of inputs (Dettmers et al., 2023)."""

from __future__ import annotations

from quire.config.codings.coding import Coding, Codings, Layout, Rule, one_of
from quire.config.fields import Fields


def read(fields: Fields) -> Codings:
    """The size of blocks stands with each matrix. Raises ConfigError."""
    for names in (("load_in_8bit", "_load_in_8bit"), ("load_in_4bit", "_load_in_4bit")):
        own = next((name for name in names if name in fields), names[0])
        one_of(fields, own, (names[0] == "load_in_4bit",), False)
    one_of(fields, "bnb_4bit_quant_type", ("nf4",), "fp4")
    one_of(fields, "bnb_4bit_quant_storage", ("uint8",), "uint8")
    return Codings(method="bitsandbytes", rules=(Rule(Coding(layout=Layout.NF4, bits=4, is_float=True)),))
