"""compressed-tensors, as llm-compressor writes it: rules for groups of modules, each with weights of its own kind."""

from __future__ import annotations

from typing import Final

import msgspec

from quire.config.codings import mxfp4, nvfp4
from quire.config.codings.coding import (
    MAX_PATTERNS,
    PATTERN,
    Coding,
    Codings,
    Layout,
    Rule,
    group_of,
    one_of,
    pattern_of,
    unsupported,
)
from quire.config.codings.fp8 import e4m3, is_block
from quire.config.fields import Fields
from quire.config.pattern import PatternError
from quire.core.errors import ConfigError, shown

PACKED: Final = "pack-quantized"
FP4: Final = {
    "nvfp4-pack-quantized": (nvfp4.CODING, ("tensor_group", "group")),
    "mxfp4-pack-quantized": (mxfp4.CODING, ("group",)),
}
"""Format of numbers of 4 bits → its coding, and values of its strategy, the first where config.json says nothing."""
FORMATS: Final = (PACKED, "int-quantized", "float-quantized", "naive-quantized", *FP4)
MIXED: Final = "mixed-precision"
IN_ORDER: Final = ("group", "dynamic", True)
"""Values of `actorder` with a table of groups."""
NOT_IN_ORDER: Final = ("weight", "static", False)
"""And without one, whatever order inputs were rounded in."""
MAX_GROUPS: Final = 256
MAX_TARGETS: Final = 65536


def read(fields: Fields) -> Codings:
    """Raises ConfigError."""
    form = one_of(fields, "format", (*FORMATS, MIXED), "naive-quantized")
    one_of(fields, "quantization_status", ("compressed",), "compressed")
    if "sparsity_config" in fields:
        one_of(fields.nested("sparsity_config"), "format", ("dense",), "dense")
    if fields.values.get("transform_config"):
        raise unsupported(fields, "transform_config", "a checkpoint without transforms")
    groups = fields.nested("config_groups")
    least = 0 if fields.values.get("kv_cache_scheme") else 1  # scales of a cache beside weights as they were
    if not least <= len(groups.values) <= MAX_GROUPS:
        raise fields.error("config_groups", f"an object of 1 to {MAX_GROUPS} groups")
    rules = tuple(_rule(groups.nested(name), str(form)) for name in groups.values)
    n_patterns = sum(target.startswith(PATTERN) for rule in rules for target in rule.targets)
    if n_patterns > MAX_PATTERNS:
        raise ConfigError(
            f"{groups.where}: {n_patterns:,} targets are regular expressions behind {PATTERN}, at most {MAX_PATTERNS}"
            " are read: write the names out",
            param="quantization_config",
        )
    # As in the library, what names a module goes before what names its class.
    return Codings(method="compressed-tensors", rules=tuple(sorted(rules, key=lambda rule: "Linear" in rule.targets)))


def _rule(group: Fields, form: str) -> Rule:
    targets = group.values.get("targets")
    if not isinstance(targets, list) or len(targets) > MAX_TARGETS or not all(isinstance(one, str) for one in targets):
        raise group.error("targets", "a list of names")
    _check_patterns(group, [one for one in targets if one.startswith(PATTERN)])
    if group.values.get("output_activations"):
        raise unsupported(group, "output_activations", "null")
    if "format" in group:
        form = str(one_of(group, "format", FORMATS))
    elif form == MIXED:
        raise unsupported(group, "format", *FORMATS)
    return Rule(_coding(group.nested("weights"), group.nested("input_activations"), form), tuple(targets))


def _check_patterns(group: Fields, patterns: list[str]) -> None:
    for one in patterns:
        try:
            pattern_of(one)
        except PatternError as error:
            raise ConfigError(
                f"{group.where}: targets has {shown(one)}: {error}: write it in another way, or the names out",
                param="quantization_config",
            ) from None


def _coding(weights: Fields, inputs: Fields, form: str) -> Coding:
    if form in FP4:
        return _fp4(weights, inputs, form)
    is_float = one_of(weights, "type", ("int", "float"), "int") == "float"
    bits = one_of(weights, "num_bits", (8,) if is_float or form != PACKED else (4, 8))
    assert isinstance(bits, int)
    static = bool(inputs.values) and _are_static(inputs)
    strategy = one_of(weights, "strategy", ("tensor", "channel", "group", "block"))
    if is_float:
        if form == PACKED:
            raise unsupported(weights, "type", "int in pack-quantized")
        one_of(weights, "strategy", ("tensor", "channel", "block"))
        coding = e4m3(_block(weights) if strategy == "block" else None, static=static)
    else:
        one_of(weights, "strategy", ("tensor", "channel", "group"))
        order = one_of(weights, "actorder", (*IN_ORDER, *NOT_IN_ORDER), False)
        coding = Coding(
            layout=Layout.PACKED if form == PACKED else Layout.SCALED, bits=bits,
            group=group_of(weights, "group_size") if strategy == "group" else 0,
            symmetric=weights.flag("symmetric", True), act_order=order in IN_ORDER,
        )  # fmt: skip
    rounds_inputs = bool(inputs.values) and coding.layout is Layout.SCALED
    return msgspec.structs.replace(coding, rounds_inputs=rounds_inputs, static_inputs=static and rounds_inputs)


def _fp4(weights: Fields, inputs: Fields, form: str) -> Coding:
    """Inputs are not rounded, whatever is said of them."""
    coding, strategies = FP4[form]
    one_of(weights, "type", ("float",))
    one_of(weights, "num_bits", (coding.bits,))
    one_of(weights, "strategy", strategies, strategies[0])
    one_of(weights, "group_size", (coding.group,))
    one_of(weights, "symmetric", (True,), True)
    if inputs.values:
        one_of(inputs, "num_bits", (4, 8))
    return coding


def _block(weights: Fields) -> list[int]:
    block = weights.values.get("block_structure")
    if not is_block(block):
        raise weights.error("block_structure", "two numbers of outputs and inputs")
    assert isinstance(block, list)
    return block


def _are_static(inputs: Fields) -> bool:
    """Whether the scale of activations is stored."""
    one_of(inputs, "num_bits", (8,))
    if inputs.values.get("dynamic") is True:
        return False
    one_of(inputs, "dynamic", (False,), False)
    one_of(inputs, "strategy", ("tensor",), "tensor")
    if inputs.values.get("symmetric") is False:
        raise ConfigError(
            f"{inputs.where}: symmetric = False is not supported for activations with a stored scale: only true is",
            param="quantization_config",
        )
    return True
