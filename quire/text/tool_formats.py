"""The formats of tool calls, by vLLM's names: which one a chat template teaches, and what reads it.

Does not own the formats (`tool_calls.py`, `xml_calls.py`, `harmony.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from quire.text.tool_calls import FORMATS, ReadsCalls, ToolReader
from quire.text.xml_calls import XML_FORMATS, XmlReader
from quire.text.xml_values import JsonObject


def format_of(sources: Sequence[str]) -> str | None:
    """The name of the format that these chat templates teach their model, if it is one that is known here."""
    for source in sources:
        if "[TOOL_CALLS]" in source:
            return "mistral"
        if "<|python_tag|>" in source:
            return "llama3_json"
        if "<｜tool▁calls▁begin｜>" in source:
            return "deepseek_v3" if "```json" in source else "deepseek_v31"
        if "<minimax:tool_call>" in source:
            return "minimax_m2"
        if "<tool_call>" not in source:
            continue
        if "<arg_key>" in source:
            return "glm45"
        if "<function=" in source and "<parameter=" in source:
            return "qwen3_coder"
        if "arguments" in source and "<function=" not in source and "<parameter=" not in source:
            return "hermes"
    return None


def reader_of(style: str, functions: Mapping[str, JsonObject]) -> ReadsCalls:
    """A fresh reader of a format. functions: the schemas of those that were offered, by name."""
    if style in XML_FORMATS:
        return XmlReader(XML_FORMATS[style], functions)
    return ToolReader(FORMATS[style], functions.keys())


def marks_of(style: str) -> tuple[str, ...]:
    """Texts that must be shown for the format to be read."""
    return XML_FORMATS[style].marks if style in XML_FORMATS else FORMATS[style].marks
