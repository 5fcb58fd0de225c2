"""From `messages` and `tools` to what a chat template takes. Owns the rules of a conversation.

Does not own templates (`text/chat_template.py`) nor tokens. Invariant: every refusal names `messages[i]` or `tools[i]`.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from quire.core.errors import listed, shown
from quire.serve.http.decoding import BodyDecoder
from quire.serve.http.ignored import IgnoredParams
from quire.serve.http.refusal import MISSING, bad_request, unsupported
from quire.serve.openai.schema import (
    NO_FUNCTION,
    AssistantMessage,
    ChatRequest,
    JsonObject,
    Message,
    RefusalPart,
    TextPart,
    TokenizeRequest,
    Tool,
    ToolCall,
    ToolMessage,
)
from quire.serve.openai.validation import check_text
from quire.text.chat_template import RESERVED

MAX_MESSAGES = 4096
MAX_NAME_CHARS = 64
MAX_TOOLS = 128
MAX_SCHEMA_BYTES = 1 << 20
"""Length of all tools' parameters together. Decoding them holds the interpreter, about 50 ms for this much."""
MAX_TOOL_CALLS = 128
MAX_DEPTH = 64
"""Nesting of JSON values that reach the template."""
MAX_NODES = 20_000
MAX_KWARGS = 16
_PARAMETERS: BodyDecoder[JsonObject | None] = BodyDecoder(JsonObject | None)
_SERVER_TOOLS = """apply_patch code_execution code_interpreter computer computer_use_preview file_search
    image_generation local_shell mcp mcp_toolset namespace shell tool_search tool_search_tool_bm25
    tool_search_tool_regex web_fetch web_search web_search_preview"""
SERVER_TOOLS = frozenset(_SERVER_TOOLS.split())
"""Tools that a server runs or whose form only some models know, by name: they are skipped, as all of unknown types."""
_CLIENT_TOOL = re.compile(r"(bash|computer|memory|text_editor)_20\d{6}")
"""Anthropic's tools that the client runs: their schema is in the models that were trained for them."""
_FREEFORM = frozenset(("custom", "grammar"))
"""Tools that the client runs and whose form no model of ours can be asked for."""
_DATE = re.compile(r"_20\d{6}$|_20\d\d_\d\d_\d\d$")
_TOOL_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_KWARG_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")


@dataclasses.dataclass(frozen=True, slots=True)
class Conversation:
    """Arguments of the chat template."""

    messages: list[JsonObject]
    tools: list[JsonObject] | None
    add_generation_prompt: bool
    continue_final_message: bool
    kwargs: JsonObject
    n_chars: int
    """Size of everything that reaches the template, by `n_chars_of`: a measure of the work to come."""


def conversation_of(
    body: ChatRequest | TokenizeRequest,
    ignored: IgnoredParams,
    *,
    variables: frozenset[str] | None,
    with_tools: bool = True,
) -> Conversation:
    """Check messages, tools and template options. Raises a 400 Refusal naming the entry at fault.

    ignored: takes tools of the server, which it has not, and variables that the template has not.
    variables: what the chat template looks at; None: a request may set nothing.
    with_tools: False checks the tools and hides them from the template.
    """
    messages = body.messages or []
    if not 0 < len(messages) <= MAX_MESSAGES:
        raise bad_request(f"messages has {len(messages)} entries: it must have 1 to {MAX_MESSAGES}.", "messages")
    _check_order(messages)
    generate = True if body.add_generation_prompt is None else body.add_generation_prompt
    continues = bool(body.continue_final_message)
    if generate and continues:
        raise bad_request(
            "continue_final_message excludes add_generation_prompt: send add_generation_prompt = false too.",
            "continue_final_message",
        )
    if continues and not isinstance(messages[-1], AssistantMessage):
        raise bad_request(
            "continue_final_message needs an assistant message at the end.", f"messages[{len(messages) - 1}]"
        )
    plain = [_plain(message, index, ignored) for index, message in enumerate(messages)]
    tools = tools_of(body.tools, ignored)
    shown_tools = tools if with_tools else None
    kwargs = _kwargs(body.chat_template_kwargs, variables, ignored)
    return Conversation(
        messages=plain,
        tools=shown_tools,
        add_generation_prompt=generate,
        continue_final_message=continues,
        kwargs=kwargs,
        n_chars=n_chars_of([plain, shown_tools, kwargs]),
    )


def add_defaults(conversation: Conversation, defaults: JsonObject) -> None:
    """Set variables of the template that the request has not set."""
    for name, value in defaults.items():
        conversation.kwargs.setdefault(name, value)


def tools_of(tools: list[Tool] | None, ignored: IgnoredParams) -> list[JsonObject] | None:
    """Checked tools as plain values, None when there are none. Those that a server would run are skipped."""
    if not tools:
        return None
    if len(tools) > MAX_TOOLS:
        raise bad_request(f"tools has {len(tools)} entries: at most {MAX_TOOLS} are allowed.", "tools")
    n_bytes = sum(len(memoryview(tool.function.parameters)) for tool in tools)
    if n_bytes > MAX_SCHEMA_BYTES:
        raise bad_request(f"tools have parameters of {n_bytes} bytes: at most {MAX_SCHEMA_BYTES} are allowed.", "tools")
    seen: set[str] = set()
    plain = []
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        if tool.type in _FREEFORM:
            raise unsupported(f"{where}.type", f"only function is, not {shown(tool.type)}.")
        if _CLIENT_TOOL.fullmatch(tool.type):
            raise unsupported(
                f"{where}.type",
                f"{shown(tool.type)} is run by the client, and this server does not know that tool's schema: "
                "declare it as a custom tool, with name, description and input_schema.",
            )
        if tool.type != "function":
            kind = _DATE.sub("", tool.type)
            ignored.note(f"tools[{kind if kind in SERVER_TOOLS else 'other'}]")
            continue
        name = tool.function.name
        if tool.function is NO_FUNCTION:
            raise bad_request(f"{where}.function is missing.", f"{where}.function", MISSING)
        if not _TOOL_NAME.fullmatch(name):
            raise bad_request(
                f"{where}.function.name = {shown(name)} must be 1 to 64 letters, digits, '_', '-' or '.'.",
                f"{where}.function.name",
            )
        if name in seen:
            raise bad_request(f"{where}.function.name = {shown(name)} is used twice.", f"{where}.function.name")
        seen.add(name)
        plain.append({"type": "function", "function": _plain_function(tool, where)})
    return plain or None


def kept_choice(
    choice: str | JsonObject | None, tools: list[Tool] | None, ignored: IgnoredParams
) -> str | JsonObject | None:
    """`tool_choice`, where there is a choice: without functions, auto asks for nothing."""
    if choice == "auto" and not _functions(tools):
        ignored.note("tool_choice")
        return None
    return choice


def check_tool_choice(choice: str | JsonObject | None, tools: list[Tool] | None) -> None:
    """`auto`, `none`, `required`, and a function by name."""
    if choice is None or choice == "none":
        return
    functions = _functions(tools)
    if not functions:
        raise bad_request("tool_choice is only allowed when tools of type function are given.", "tool_choice")
    if isinstance(choice, dict):
        _check_named_tool(choice, functions)
    elif choice not in ("auto", "required"):
        raise bad_request(
            f"tool_choice = {shown(choice)} is not allowed: it must be auto, none, required or a function.",
            "tool_choice",
        )


def check_depth(value: object, param: str) -> None:
    """400 for JSON that is nested or branched too far to be handed to a template."""
    level: list[object] = [value]
    n_nodes = 0
    for _ in range(MAX_DEPTH):
        n_nodes += len(level)
        if n_nodes > MAX_NODES:
            raise bad_request(f"{param} has more than {MAX_NODES} values.", param)
        level = [child for node in level for child in _children(node)]
        if not level:
            return
    raise bad_request(f"{param} is nested deeper than {MAX_DEPTH} levels.", param)


def n_chars_of(value: object) -> int:
    """Characters of all strings in a JSON value, keys included; each value counts one more, about its punctuation."""
    total, pending = 0, [value]
    while pending:
        node = pending.pop()
        total += 1
        if isinstance(node, str):
            total += len(node)
        elif isinstance(node, dict):
            total += sum(map(len, node))
            pending += node.values()
        elif isinstance(node, list):
            pending += node
    return total


def _functions(tools: list[Tool] | None) -> list[Tool]:
    return [tool for tool in tools or [] if tool.type == "function"]


def _children(node: object) -> list[object]:
    if isinstance(node, dict):
        return list(node.values())
    return node if isinstance(node, list) else []


def _plain_function(tool: Tool, where: str) -> JsonObject:
    function: JsonObject = {"name": tool.function.name}
    if tool.function.description is not None:
        function["description"] = tool.function.description
    parameters = _PARAMETERS.decode(tool.function.parameters, IgnoredParams(), f"{where}.function.parameters")
    if parameters is not None:
        check_depth(parameters, f"{where}.function.parameters")
        if parameters.get("type", "object") != "object":
            raise bad_request(
                f"{where}.function.parameters must be a JSON schema of type object.", f"{where}.function.parameters"
            )
    function["parameters"] = {"type": "object", "properties": {}} if parameters is None else parameters
    return function


def _check_named_tool(choice: JsonObject, tools: list[Tool]) -> None:
    if choice.get("type") != "function":
        raise unsupported("tool_choice.type", f"only function is, not {shown(choice.get('type'))}.")
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    offered = [tool.function.name for tool in tools]
    if not isinstance(name, str) or name not in offered:
        raise bad_request(
            f"tool_choice names {shown(name)}, which is not in tools: offered are {listed(offered)}.", "tool_choice"
        )


def _check_order(messages: list[Message]) -> None:
    """Tool results answer the calls of the assistant message before them, each once; no two assistants in a row."""
    open_calls: set[str] = set()
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if isinstance(message, ToolMessage):
            if message.tool_call_id not in open_calls:
                raise bad_request(
                    f"{where}.tool_call_id answers no open tool call of the assistant message before it.", where
                )
            open_calls.discard(message.tool_call_id)
            continue
        if open_calls:
            raise bad_request(
                f"{where} comes before the results of all tool calls of the assistant message before it.", where
            )
        if isinstance(message, AssistantMessage):
            if index and isinstance(messages[index - 1], AssistantMessage):
                raise bad_request(f"{where} is a second assistant message in a row: join the two.", where)
            open_calls = _call_ids(message.tool_calls or [], where)


def _call_ids(calls: list[ToolCall], where: str) -> set[str]:
    if len(calls) > MAX_TOOL_CALLS:
        raise bad_request(
            f"{where}.tool_calls has {len(calls)} entries: at most {MAX_TOOL_CALLS} are allowed.", f"{where}.tool_calls"
        )
    ids = {call.id for call in calls}
    if len(ids) != len(calls):
        raise bad_request(f"{where}.tool_calls has two calls with the same id.", f"{where}.tool_calls")
    return ids


def _plain(message: Message, index: int, ignored: IgnoredParams) -> JsonObject:
    where = f"messages[{index}]"
    check_text(f"{where}.name", message.name, MAX_NAME_CHARS)
    plain: JsonObject = {"role": message.__struct_config__.tag, "content": _text(message.content)}
    if message.name is not None:
        plain["name"] = message.name
    if isinstance(message, ToolMessage):
        plain["tool_call_id"] = message.tool_call_id
    if isinstance(message, AssistantMessage):
        if message.content is None and not message.tool_calls and message.refusal is None:
            raise bad_request(f"{where} has neither content nor tool_calls.", where)
        if message.content is None and message.refusal is not None:
            plain["content"] = message.refusal
        reasoning = message.reasoning_content
        if reasoning is None and isinstance(message.reasoning, str):
            reasoning = message.reasoning
        elif message.reasoning not in (None, reasoning):
            ignored.note(f"{where}.reasoning")
        if reasoning is not None:
            plain["reasoning_content"] = reasoning
        if message.tool_calls:
            plain["tool_calls"] = [_plain_call(call, where) for call in message.tool_calls]
    elif not message.content and not isinstance(message, ToolMessage):
        raise bad_request(f"{where}.content is empty.", where)
    return plain


def _plain_call(call: ToolCall, where: str) -> JsonObject:
    if call.type not in (None, "function"):
        raise unsupported(f"{where}.tool_calls", "only calls of type function are.")
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.function.name, "arguments": call.function.arguments},
    }


def _text(content: str | list[TextPart] | list[TextPart | RefusalPart] | None) -> str | None:
    """Parts are joined by newlines, as vLLM does."""
    if content is None or isinstance(content, str):
        return content
    return "\n".join(part.refusal if isinstance(part, RefusalPart) else part.text for part in content)


def _kwargs(kwargs: JsonObject | None, variables: frozenset[str] | None, ignored: IgnoredParams) -> JsonObject:
    if not kwargs:
        return {}
    if variables is None:
        raise unsupported("chat_template_kwargs", "the operator does not allow it (--no-enable-chat-template-kwargs).")
    found: JsonObject = {}
    for name, value in kwargs.items():
        if name not in variables and name not in RESERVED.split():
            ignored.note(f"chat_template_kwargs.{name}")
            continue
        if not _KWARG_NAME.fullmatch(name):
            raise bad_request(f"chat_template_kwargs may not set {shown(name)}.", "chat_template_kwargs")
        _check_scalar(name, value)
        found[name] = value
    if len(found) > MAX_KWARGS:
        raise bad_request(
            f"chat_template_kwargs sets {len(found)} variables: at most {MAX_KWARGS} are allowed.",
            "chat_template_kwargs",
        )
    return found


def _check_scalar(name: str, value: Any) -> None:
    if value is not None and not isinstance(value, (bool, int, float, str)):
        raise bad_request(
            f"chat_template_kwargs.{name} must be a string, number, boolean or null.", "chat_template_kwargs"
        )
    if isinstance(value, str):
        check_text(f"chat_template_kwargs.{name}", value, MAX_NAME_CHARS)
