"""NVIDIA's ModelOpt: FP8 with one scale a tensor, and NVFP4. Older ones say it in a file of its own."""

from __future__ import annotations

from typing import Any, Final

from quire.config.codings import nvfp4
from quire.config.codings.coding import Codings, Rule, one_of
from quire.config.codings.fp8 import e4m3
from quire.config.fields import Fields

FILE: Final = "hf_quant_config.json"
"""What says it where config.json does not."""


def of_file(values: dict[str, Any]) -> dict[str, Any] | None:
    """What config.json would say of it; None: no matrix is quantised, perhaps a cache."""
    inner = values.get("quantization")
    return {"quant_method": "modelopt", **values} if isinstance(inner, dict) and inner.get("quant_algo") else None


def read(fields: Fields) -> Codings:
    """Raises ConfigError."""
    inner = fields.nested("quantization") if "quantization" in fields else fields
    if one_of(inner, "quant_algo", ("FP8", "NVFP4")) == "FP8":
        return Codings(method="ModelOpt", rules=(Rule(e4m3(None, static=True)),))
    one_of(inner, "group_size", (nvfp4.GROUP,), nvfp4.GROUP)
    return Codings(method="ModelOpt", rules=(Rule(nvfp4.CODING),))
