"""Methods of quantised checkpoints: `read_codings` of a config.json's quantization_config, a file for each method."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final

import msgspec

from quire.config.codings import awq, bitsandbytes, compressed, fp8, gptq, modelopt, mxfp4
from quire.config.codings.coding import INSTEAD, Coding, Codings, Layout
from quire.config.fields import Fields
from quire.config.parameters import HEAD
from quire.core.errors import ConfigError, shown

METHODS: Final[Mapping[str, Callable[[Fields], Codings]]] = {
    "gptq": gptq.read,
    "awq": awq.read,
    "fp8": fp8.read,
    "modelopt": modelopt.read,
    "compressed-tensors": compressed.read,
    "mxfp4": mxfp4.read,
    "bitsandbytes": bitsandbytes.read,
    "modelopt_fp4": modelopt.read,
}
"""quant_method → what reads the rest."""
LEFT: Final = ("ignore", "modules_to_not_convert", "ignored_layers", "exclude_modules", "llm_int8_skip_modules")
"""Keys of what writers leave as it is."""

__all__ = ["METHODS", "Coding", "Codings", "Layout", "read_codings"]


def read_codings(config: Fields) -> Codings | None:
    """What a config.json says of its quantised matrices; None where none is. Raises ConfigError naming the key, its
    value and what would work."""
    if "quantization_config" not in config:
        return None
    fields = config.nested("quantization_config")
    method = fields.values.get("quant_method")
    if method is None and isinstance(fields.values.get("config_groups"), dict):
        method = "compressed-tensors"
    if not isinstance(method, str) or method not in METHODS:
        raise ConfigError(
            f"{fields.where}: quant_method = {shown(method)} is not read; {', '.join(METHODS)} are. {INSTEAD}.",
            param="quantization_config",
        )
    try:
        codings = METHODS[method](fields)
    except ConfigError as error:  # a key inside it
        raise ConfigError(error.message, param="quantization_config") from None
    return msgspec.structs.replace(codings, left=(*codings.left, *_left(fields, method)))


def _left(fields: Fields, method: str) -> Iterator[str]:
    """The head is quantised only where the writer says so: compressed-tensors names it where it is not."""
    if method != "compressed-tensors" and fields.values.get("lm_head") is not True:
        yield HEAD
    inner = fields.values.get("quantization")
    for values in (fields.values, inner if isinstance(inner, dict) else {}):
        for key in LEFT:
            names = values.get(key)
            yield from (one for one in names if isinstance(one, str)) if isinstance(names, list) else ()
