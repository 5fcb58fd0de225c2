"""The JSON body of POST /v1/responses, as types: what is honoured, and the fields of the API's own answers.

Owns names and types; ranges and combinations are checked where the body becomes a conversation (`responses_input.py`).
Invariant: an explicit null means the same as leaving the field out.
"""

from __future__ import annotations

from typing import Any

import msgspec

from quire.serve.openai.schema import CommonFields, JsonObject


class TextOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What the text of the answer looks like."""

    format: JsonObject | None = None


class ReasoningOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """How the model reasons."""

    effort: str | None = None


class ResponsesTool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One entry of `tools`; a function is flat here. Other types are skipped."""

    type: str
    name: str = ""
    description: str | None = None
    parameters: msgspec.Raw = msgspec.Raw(b"null")
    strict: bool | None = None


class ResponsesRequest(CommonFields, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/responses. `input` items stay bytes until their own `type` says what they are."""

    input: str | list[msgspec.Raw]
    instructions: str | None = None
    max_output_tokens: int | None = None
    top_logprobs: int | None = None
    tools: list[ResponsesTool] | None = None
    tool_choice: str | JsonObject | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: list[str] | None = None
    metadata: dict[str, str] | None = None
    chat_template_kwargs: JsonObject | None = None


class ItemType(msgspec.Struct):
    """What an item is, a message if it does not say; the other fields are read once that is known."""

    type: str | None = None


class InputText(msgspec.Struct, tag="input_text", tag_field="type", kw_only=True, forbid_unknown_fields=True):
    """A piece of text for the model."""

    text: str


class OutputText(msgspec.Struct, tag="output_text", tag_field="type", kw_only=True, forbid_unknown_fields=True):
    """A piece of text that the model wrote; an answer's part can be sent back as it came."""

    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class RefusalText(msgspec.Struct, tag="refusal", tag_field="type", kw_only=True, forbid_unknown_fields=True):
    """A refusal that the model wrote."""

    refusal: str


class ReasoningText(msgspec.Struct, tag="reasoning_text", tag_field="type", kw_only=True, forbid_unknown_fields=True):
    """A piece of the model's reasoning."""

    text: str


class MessageItem(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A message of any role; `type` may be left out."""

    role: str
    content: str | list[InputText | OutputText | RefusalText]
    type: str | None = None
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class CallItem(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A function call that the model made."""

    type: str
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: str | None = None


class CallOutputItem(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The result of a function call."""

    type: str
    call_id: str
    output: str | list[InputText]
    id: str | None = None
    status: str | None = None


class ReasoningItem(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What the model thought before what follows."""

    type: str
    id: str | None = None
    content: list[ReasoningText] | None = None
    summary: list[Any] | None = None
    encrypted_content: Any = None
    """Another server's, which says nothing here."""
    status: str | None = None
