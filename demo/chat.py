"""Owns the chat format: the Jinja template that ships with the model, and the same rendering in Python.

ChatML turns (`<|im_start|>role ... <|im_end|>`), tools listed in the system turn, calls in `<tool_call>` blocks
and results in `<tool_response>` blocks. `render` is what training data is made with; `evaluate.py` checks that
it equals the template.
"""

from __future__ import annotations

import json
from typing import Any

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
SPECIAL_TOKENS = [END_OF_TEXT, TURN_START, TURN_END]
MARKER_TOKENS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]

TOOLS_BEFORE = "# Tools\n\nYou may call these functions:\n<tools>"
TOOLS_AFTER = (
    "\n</tools>\n\nTo call a function, reply with:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)

CHAT_TEMPLATE = (
    r"""
{%- macro text_of(content) -%}
    {%- if content is string -%}
        {{- content -}}
    {%- elif content is not none and content is defined -%}
        {%- for part in content -%}
            {%- if part.type == 'text' -%}{{- part.text -}}{%- endif -%}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- set first_is_system = messages and messages[0].role == 'system' -%}
{%- if tools -%}
    {{- '<|im_start|>system\n' -}}
    {%- if first_is_system -%}
        {{- text_of(messages[0].content) + '\n\n' -}}
    {%- endif -%}
    {{- TOOLS_BEFORE -}}
    {%- for tool in tools -%}
        {{- '\n' -}}{{- tool | tojson -}}
    {%- endfor -%}
    {{- TOOLS_AFTER + '<|im_end|>\n' -}}
{%- endif -%}
{%- for message in messages -%}
    {%- if message.role == 'tool' -%}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}
            {{- '<|im_start|>tool' -}}
        {%- endif -%}
        {{- '\n<tool_response>\n' + text_of(message.content) + '\n</tool_response>' -}}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}
            {{- '<|im_end|>\n' -}}
        {%- endif -%}
    {%- elif message.role == 'assistant' and message.tool_calls -%}
        {{- '<|im_start|>assistant\n' -}}
        {%- set said = text_of(message.content) -%}
        {%- if said -%}{{- said + '\n' -}}{%- endif -%}
        {%- for call in message.tool_calls -%}
            {%- if call.function is defined -%}{%- set call = call.function -%}{%- endif -%}
            {%- if not loop.first -%}{{- '\n' -}}{%- endif -%}
            {{- '<tool_call>\n{"name": "' + call.name + '", "arguments": ' -}}
            {%- if call.arguments is string -%}{{- call.arguments -}}
            {%- else -%}{{- call.arguments | tojson -}}{%- endif -%}
            {{- '}\n</tool_call>' -}}
        {%- endfor -%}
        {{- '<|im_end|>\n' -}}
    {%- elif not (tools and loop.first and message.role == 'system') -%}
        {{- '<|im_start|>' + message.role + '\n' + text_of(message.content) + '<|im_end|>\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\n' -}}
{%- endif -%}
""".replace("TOOLS_BEFORE", repr(TOOLS_BEFORE))
    .replace("TOOLS_AFTER", repr(TOOLS_AFTER))
    .strip()
)


def call_text(name: str, arguments: dict[str, Any]) -> str:
    """One tool call as the model writes it."""
    body = f'{{"name": "{name}", "arguments": {json.dumps(arguments, ensure_ascii=False)}}}'
    return f"<tool_call>\n{body}\n</tool_call>"


def _assistant_text(message: dict[str, Any]) -> str:
    calls = [call_text(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", [])]
    said = message.get("content") or ""
    return "\n".join(([said] if said else []) + calls)


def render(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, add_generation_prompt: bool = False
) -> str:
    """The text of a conversation, equal to what CHAT_TEMPLATE gives for it (string contents only)."""
    parts: list[str] = []
    rest = messages
    if tools:
        own = ""
        if messages and messages[0]["role"] == "system":
            own, rest = messages[0]["content"] + "\n\n", messages[1:]
        listing = "".join("\n" + json.dumps(tool, ensure_ascii=False) for tool in tools)
        parts.append(f"{TURN_START}system\n{own}{TOOLS_BEFORE}{listing}{TOOLS_AFTER}{TURN_END}\n")
    for i, message in enumerate(rest):
        role = message["role"]
        if role == "tool":
            if i == 0 or rest[i - 1]["role"] != "tool":
                parts.append(f"{TURN_START}tool")
            parts.append(f"\n<tool_response>\n{message['content']}\n</tool_response>")
            if i + 1 == len(rest) or rest[i + 1]["role"] != "tool":
                parts.append(f"{TURN_END}\n")
        elif role == "assistant":
            parts.append(f"{TURN_START}assistant\n{_assistant_text(message)}{TURN_END}\n")
        else:
            parts.append(f"{TURN_START}{role}\n{message['content']}{TURN_END}\n")
    if add_generation_prompt:
        parts.append(f"{TURN_START}assistant\n")
    return "".join(parts)
