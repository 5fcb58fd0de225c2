"""GPTQ: integers of 2, 4 or 8 bits with zero points, perhaps in the order of activations (Frantar et al., 2022)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from quire.config.codings.coding import PATTERN, Coding, Codings, Layout, Rule, group_of, one_of, unsupported
from quire.config.fields import Fields

ZERO_LESS: Final = {"gptq": 1, "gptq_v2": 0}
"""checkpoint_format → what its zero points are stored less."""
MODULES: Final = "modules_in_block_to_quantize"
"""Key of what was quantised, where that is not all."""


def read(fields: Fields) -> Codings:
    """Raises ConfigError."""
    bits = one_of(fields, "bits", (2, 4, 8))
    assert isinstance(bits, int)
    form = one_of(fields, "checkpoint_format", ZERO_LESS, "gptq")
    one_of(fields, "pack_dtype", ("int32",), "int32")
    one_of(fields, "is_marlin_format", (False,), False)
    dynamic = fields.values.get("dynamic") or {}
    if not isinstance(dynamic, dict) or any(not str(name).startswith("-:") for name in dynamic):
        raise unsupported(fields, "dynamic", "a table of modules that are left out (-:)")
    coding = Coding(
        layout=Layout.GPTQ, bits=bits, group=group_of(fields, "group_size"), symmetric=fields.flag("sym", True),
        act_order=fields.flag("desc_act", False), zero_less=ZERO_LESS[str(form)],
    )  # fmt: skip
    left = tuple(PATTERN + name.removeprefix("-:") for name in dynamic)
    return Codings(method="GPTQ", rules=(Rule(coding),), left=left, only=tuple(_only(fields.values.get(MODULES))))


def _only(value: Any) -> Iterator[str]:
    """Names of modules, as Optimum writes them: in lists, one for those that were quantised together; or in one."""
    for one in value if isinstance(value, list) else []:
        yield from (name for name in (one if isinstance(one, list) else [one]) if isinstance(name, str))
