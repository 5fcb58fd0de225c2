"""From the items of POST /v1/responses to the conversation that chat has. Owns the meaning of items and their order.

Does not own the rules of a conversation (`conversation.py`) nor of sampling: they see a `ChatRequest`.
Invariant: whatever they refuse is named by the client's own field, through `Translated.names`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from quire.core.errors import shown
from quire.serve.http.decoding import BodyDecoder
from quire.serve.http.ignored import IgnoredParams
from quire.serve.http.refusal import bad_request, unsupported
from quire.serve.openai.naming import Translated
from quire.serve.openai.responses_schema import (
    CallItem,
    CallOutputItem,
    InputText,
    ItemType,
    MessageItem,
    OutputText,
    ReasoningItem,
    RefusalText,
    ResponsesRequest,
)
from quire.serve.openai.schema import (
    AssistantMessage,
    ChatRequest,
    CommonFields,
    DeveloperMessage,
    FunctionCall,
    FunctionTool,
    JsonObject,
    Message,
    RefusalPart,
    SystemMessage,
    TextPart,
    Tool,
    ToolCall,
    ToolMessage,
    UserMessage,
)
from quire.serve.openai.validation import check_metadata

MAX_ITEMS = 4096
LOGPROBS = "message.output_text.logprobs"

_SERVER_ITEMS = """code_interpreter_call file_search_call image_generation_call mcp_approval_request
    mcp_approval_response mcp_call mcp_list_tools tool_search_call tool_search_output web_search_call"""
SERVER_ITEMS = frozenset(_SERVER_ITEMS.split())
"""What another server did with tools of its own, which are skipped too."""

_ITEM_TYPE: BodyDecoder[ItemType] = BodyDecoder(ItemType)
_ITEMS: dict[str, BodyDecoder[Any]] = {
    "message": BodyDecoder(MessageItem),
    "function_call": BodyDecoder(CallItem),
    "function_call_output": BodyDecoder(CallOutputItem),
    "reasoning": BodyDecoder(ReasoningItem),
}


def translate(body: ResponsesRequest, ignored: IgnoredParams) -> Translated:
    """Raises a 400 Refusal that names the field or item at fault. ignored: takes what does nothing here."""
    _check_fields(body, ignored)
    names = {"max_tokens": "max_output_tokens", "max_completion_tokens": "max_output_tokens", "prompt": "input"}
    names |= {
        "messages": "input",
        "reasoning_effort": "reasoning.effort",
        "response_format": "text.format",
    }
    names |= {"response_format.json_schema": "text.format", "structured_outputs.json": "text.format.schema"}
    is_shaped = body.text is not None and body.text.format is not None
    names |= {"structured_outputs": "text.format" if is_shaped else "tools", "structured_outputs.calls": "tools"}
    text = body.text
    chat = ChatRequest(
        **{name: getattr(body, name) for name in CommonFields.__struct_fields__},
        messages=_messages(body, names, ignored),
        max_completion_tokens=body.max_output_tokens,
        logprobs=LOGPROBS in (body.include or []),
        top_logprobs=body.top_logprobs,
        tools=_tools(body, names) or None,
        tool_choice=_tool_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=None if text is None else _response_format(text.format),
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
        chat_template_kwargs=body.chat_template_kwargs,
    )
    return Translated(chat, names)


def _check_fields(body: ResponsesRequest, ignored: IgnoredParams) -> None:
    check_metadata(body.metadata)
    for kind in body.include or []:
        if kind != LOGPROBS:
            ignored.note("include")
    if body.top_logprobs and LOGPROBS not in (body.include or []):
        raise bad_request(f"top_logprobs needs include = [{LOGPROBS}].", "top_logprobs")
    options = body.stream_options
    if options is not None and options.continuous_usage_stats:
        ignored.note("stream_options.continuous_usage_stats")


def _messages(body: ResponsesRequest, names: dict[str, str], ignored: IgnoredParams) -> list[Message]:
    messages: list[Message] = []
    if body.instructions is not None:
        names["messages[0]"] = "instructions"
        messages.append(SystemMessage(content=body.instructions))
    if isinstance(body.input, str):
        names[f"messages[{len(messages)}]"] = "input"
        return [*messages, UserMessage(content=body.input)]
    if not 0 < len(body.input) <= MAX_ITEMS:
        raise bad_request(f"input has {len(body.input)} entries: it must have 1 to {MAX_ITEMS}.", "input")
    thoughts: list[str] = []
    for index, raw in enumerate(body.input):
        where = f"input[{index}]"
        item = _item(raw, where, ignored)
        if item is None:
            continue
        if isinstance(item, ReasoningItem):
            thoughts += _thought(item, where, ignored)
            continue
        new = _message(item, where)
        if thoughts and isinstance(new, AssistantMessage):
            new.reasoning_content = "\n".join(thoughts) or None
        elif thoughts:
            ignored.note("input[reasoning]")
        thoughts = []
        message = _merged(messages, new)
        if message is not None:
            names[f"messages[{len(messages)}]"] = where
            messages.append(message)
    if thoughts:
        ignored.note("input[reasoning]")
    return messages


def _thought(item: ReasoningItem, where: str, ignored: IgnoredParams) -> list[str]:
    """What can be read of a reasoning item. Another server's is encrypted, perhaps with a summary for people."""
    for name in ("encrypted_content", "summary"):
        if getattr(item, name):
            ignored.note(f"{where}.{name}")
    return [part.text for part in item.content or []]


def _item(raw: msgspec.Raw, where: str, ignored: IgnoredParams) -> Any:
    """None for what a server did, which is skipped."""
    kind = _ITEM_TYPE.decode(raw, ignored, where).type or "message"
    decoder = _ITEMS.get(kind)
    if kind in SERVER_ITEMS:
        ignored.note(f"input[{kind}]")
        return None
    if decoder is None:
        raise unsupported(f"{where}.type", f"{shown(kind)} is none of {', '.join(_ITEMS)}.")
    return decoder.decode(raw, ignored, where)


def _message(item: MessageItem | CallItem | CallOutputItem, where: str) -> Message:
    if isinstance(item, CallOutputItem):
        return ToolMessage(content=_parts(item.output, where), tool_call_id=item.call_id)
    if isinstance(item, CallItem):
        return AssistantMessage(
            tool_calls=[ToolCall(id=item.call_id, function=FunctionCall(item.name, item.arguments))]
        )
    if item.role == "assistant":
        content = item.content
        if isinstance(content, str):
            return AssistantMessage(content=content)
        return AssistantMessage(content=[_assistant_part(part) for part in content])
    kinds: dict[str, Callable[..., Message]] = {
        "user": UserMessage,
        "system": SystemMessage,
        "developer": DeveloperMessage,
    }
    kind = kinds.get(item.role)
    if kind is None:
        allowed = ", ".join(["assistant", *kinds])
        raise bad_request(
            f"{where}.role = {shown(item.role)} is not allowed: it must be one of {allowed}.", f"{where}.role"
        )
    return kind(content=_parts(item.content, where))


def _merged(messages: list[Message], new: Message) -> Message | None:
    """`new`, or None if it was joined to the assistant's message before it: a turn may come as several items."""
    last = messages[-1] if messages else None
    if not isinstance(new, AssistantMessage) or not isinstance(last, AssistantMessage):
        return new
    if last.tool_calls and new.content is not None:
        return new
    messages[-1] = AssistantMessage(
        content=_joined(last.content, new.content),
        tool_calls=[*(last.tool_calls or []), *(new.tool_calls or [])] or None,
        reasoning_content=_joined_text(last.reasoning_content, new.reasoning_content),
    )
    return None


Content = str | list[TextPart | RefusalPart] | None


def _joined(first: Content, second: Content) -> Content:
    if first is None or second is None:
        return first if second is None else second
    return [*_as_parts(first), *_as_parts(second)]


def _as_parts(content: str | list[TextPart | RefusalPart]) -> list[TextPart | RefusalPart]:
    return [TextPart(content)] if isinstance(content, str) else content


def _joined_text(first: str | None, second: str | None) -> str | None:
    return "\n".join(text for text in (first, second) if text is not None) or None


def _assistant_part(part: InputText | OutputText | RefusalText) -> TextPart | RefusalPart:
    return RefusalPart(part.refusal) if isinstance(part, RefusalText) else TextPart(part.text)


def _parts(content: str | list[Any], where: str) -> str | list[TextPart]:
    if isinstance(content, str):
        return content
    for index, part in enumerate(content):
        if not isinstance(part, InputText):
            raise bad_request(f"{where}.content[{index}] must be input_text.", f"{where}.content[{index}].type")
    return [TextPart(part.text) for part in content]


def _tools(body: ResponsesRequest, names: dict[str, str]) -> list[Tool]:
    """A function is flat here."""
    found = []
    for index, tool in enumerate(body.tools or []):
        names[f"tools[{index}].function"] = f"tools[{index}]"
        function = FunctionTool(
            name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict
        )
        found.append(Tool(type=tool.type, function=function))
    return found


def _tool_choice(choice: str | JsonObject | None) -> str | JsonObject | None:
    """A named function is flat here."""
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") != "function":
        raise unsupported("tool_choice", "only none, auto, required and a function by name are.")
    return {"type": "function", "function": {"name": choice.get("name")}}


def _response_format(shape: JsonObject | None) -> JsonObject | None:
    """A JSON schema is flat here."""
    if shape is None or shape.get("type") != "json_schema":
        return shape
    return {"type": "json_schema", "json_schema": {key: value for key, value in shape.items() if key != "type"}}
