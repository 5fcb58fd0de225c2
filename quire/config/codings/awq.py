"""AWQ: integers of 4 bits with zero points, scaled by activations before they were rounded (Lin et al., 2023)."""

from __future__ import annotations

from quire.config.codings.coding import Coding, Codings, Layout, Rule, group_of, one_of
from quire.config.fields import Fields


def read(fields: Fields) -> Codings:
    """Raises ConfigError."""
    one_of(fields, "bits" if "bits" in fields else "w_bit", (4,))
    version = fields.values.get("version")
    if isinstance(version, str):
        fields = Fields({**fields.values, "version": version.lower()}, fields.where)
    one_of(fields, "version", ("gemm",), "gemm")
    group = group_of(fields, "group_size" if "group_size" in fields else "q_group_size")
    fields.flag("zero_point", True)
    coding = Coding(layout=Layout.AWQ, bits=4, group=group, symmetric=False)
    return Codings(method="AWQ", rules=(Rule(coding),))
