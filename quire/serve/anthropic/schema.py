"""The JSON bodies of POST /v1/messages and /v1/messages/count_tokens, as types.

Owns names and types; ranges and combinations are checked where the body becomes a conversation (`input.py`).
Invariant: an explicit null means the same as leaving the field out.
"""

from __future__ import annotations

from typing import Any

import msgspec

from quire.serve.openai.schema import JsonObject, Thinking


class TextBlock(msgspec.Struct, tag="text", tag_field="type", kw_only=True, forbid_unknown_fields=True):
    """Text of the user, the model or a tool."""

    text: str
    citations: list[Any] | None = None


class ThinkingBlock(msgspec.Struct, tag="thinking", tag_field="type", kw_only=True, forbid_unknown_fields=True):
    """What the model thought; the signature of an answer can be sent back as it came."""

    thinking: str
    signature: str | None = None


class ToolUseBlock(msgspec.Struct, tag="tool_use", tag_field="type", kw_only=True, forbid_unknown_fields=True):
    """A call that the model made."""

    id: str
    name: str
    input: msgspec.Raw
    caller: JsonObject | None = None


class ToolResultBlock(msgspec.Struct, tag="tool_result", tag_field="type", kw_only=True, forbid_unknown_fields=True):
    """The result of a call."""

    tool_use_id: str
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None


class MessageParam(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One turn."""

    role: str
    content: str | list[TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock]


class MessagesTool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A function that the model may call, or a tool of a type that is skipped."""

    name: str = ""
    input_schema: msgspec.Raw = msgspec.Raw(b"null")
    description: str | None = None
    type: str | None = None
    strict: bool | None = None


class ToolChoice(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Whether the model must call something."""

    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class MessageMetadata(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A label without effect."""

    user_id: str | None = None


class OutputConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What the text of the answer looks like."""

    format: JsonObject | None = None
    effort: str | None = None


class Thread(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A conversation that the server is asked to keep, so that the next request sends only what is new."""

    type: str
    previous_message_id: str | None = None


class CountTokensRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/messages/count_tokens: what a conversation is, without how it is to be continued."""

    model: str
    messages: list[MessageParam]
    system: str | list[TextBlock] | None = None
    tools: list[MessagesTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    thread: Thread | None = None
    context_management: JsonObject | None = None


class MessagesRequest(CountTokensRequest, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/messages."""

    max_tokens: int
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    metadata: MessageMetadata | None = None
    priority: int | None = None
    cache_salt: str | None = None
