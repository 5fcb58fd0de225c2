"""FP8: e4m3 with a scale for a tensor, an output or a block, as DeepSeek and transformers write it."""

from __future__ import annotations

from typing import Any

from quire.config.codings.coding import Coding, Codings, Layout, Rule, one_of
from quire.config.fields import Fields, is_integer


def read(fields: Fields) -> Codings:
    """Raises ConfigError."""
    one_of(fields, "fmt", ("e4m3",), "e4m3")
    inputs = one_of(fields, "activation_scheme", ("dynamic", "static"), "dynamic")
    block = fields.values.get("weight_block_size")
    if block is not None and not is_block(block):
        raise fields.error("weight_block_size", "two numbers of outputs and inputs, or null")
    return Codings(method="FP8", rules=(Rule(e4m3(block, static=inputs == "static")),))


def is_block(value: Any) -> bool:
    """Whether it is the size of a block."""
    return isinstance(value, list) and len(value) == 2 and all(is_integer(one) and 0 < one <= 4096 for one in value)


def e4m3(block: list[int] | None, *, static: bool) -> Coding:
    """block: (outputs, inputs) that share a scale; None: all inputs. static: activations' scales are stored."""
    rows, group = block or (0, 0)
    return Coding(
        layout=Layout.SCALED, bits=8, is_float=True, block_rows=rows, group=group, rounds_inputs=True,
        static_inputs=static,
    )  # fmt: skip
