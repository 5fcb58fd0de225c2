"""The JSON bodies that clients send, as types: the fields that are honoured, and those of the API's own answers.

Owns names and types. Ranges and combinations are checked in `validation.py` and `conversation.py`; what becomes of
other fields is decided by `refused_fields.py`: refused by name, or ignored.
Invariant: an explicit null means the same as leaving the field out.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from quire.core.structured import StructuredOutputsParams

JsonObject = dict[str, Any]


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What a stream says besides its text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class ChoiceFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Sampling that OpenAI's and Ollama's endpoints call by the names of `SamplingParams`, which has the bounds."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None


class CommonFields(ChoiceFields, kw_only=True, forbid_unknown_fields=True):
    """What completions, chat and responses have in common."""

    model: str
    priority: int | None = None
    cache_salt: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    safety_identifier: str | None = None


class SamplingFields(CommonFields, kw_only=True, forbid_unknown_fields=True):
    """What chat and text completions have in common. The bounds of sampling are those of `SamplingParams`."""

    n: int | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    logit_bias: dict[int, float] | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    ignore_eos: bool | None = None
    deterministic: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    prompt_logprobs: int | None = None
    add_special_tokens: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    response_format: JsonObject | None = None
    structured_outputs: StructuredOutputsParams | None = None
    guided_json: JsonObject | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None


class CompletionRequest(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/completions."""

    prompt: str | list[str | int | list[int]] | None = None
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    return_token_ids: bool | None = None


class EmbeddingRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/embeddings."""

    model: str
    input: str | list[str | int | list[int]] | None = None
    encoding_format: str | None = None
    pooling: str | None = None
    normalize: bool | None = None
    add_special_tokens: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    user: str | None = None
    dimensions: int | None = None


class TextPart(msgspec.Struct, tag="text", tag_field="type", forbid_unknown_fields=True):
    """A piece of a message's text."""

    text: str


class RefusalPart(msgspec.Struct, tag="refusal", tag_field="type", forbid_unknown_fields=True):
    """A piece of an assistant message that was a refusal."""

    refusal: str


class FunctionCall(msgspec.Struct, forbid_unknown_fields=True):
    """Name and JSON arguments of a call that the model made."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One tool call of an earlier assistant message."""

    id: str
    type: str | None = None
    function: FunctionCall
    index: int | None = None


class SystemMessage(msgspec.Struct, kw_only=True, tag="system", tag_field="role", forbid_unknown_fields=True):
    """Instructions."""

    content: str | list[TextPart]
    name: str | None = None


class DeveloperMessage(msgspec.Struct, kw_only=True, tag="developer", tag_field="role", forbid_unknown_fields=True):
    """Instructions under OpenAI's newer name; templates know them as `system`."""

    content: str | list[TextPart]
    name: str | None = None


class UserMessage(msgspec.Struct, kw_only=True, tag="user", tag_field="role", forbid_unknown_fields=True):
    """What the user says."""

    content: str | list[TextPart]
    name: str | None = None


class AssistantMessage(msgspec.Struct, kw_only=True, tag="assistant", tag_field="role", forbid_unknown_fields=True):
    """What the model said. Fields of OpenAI's own answers are known, so that an answer can be sent back as it came."""

    content: str | list[TextPart | RefusalPart] | None = None
    name: str | None = None
    refusal: str | None = None
    tool_calls: list[ToolCall] | None = None
    reasoning_content: str | None = None
    reasoning: Any = None
    """vLLM's newer name of `reasoning_content`; other servers keep other things there, which are ignored."""
    annotations: list[Any] | None = None


class ToolMessage(msgspec.Struct, kw_only=True, tag="tool", tag_field="role", forbid_unknown_fields=True):
    """The result of a tool call."""

    content: str | list[TextPart]
    tool_call_id: str
    name: str | None = None


Message = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage


class FunctionTool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: msgspec.Raw = msgspec.Raw(b"null")
    """A JSON object or null, decoded in `conversation.py` once its length is known to be sane."""
    strict: bool | None = None


NO_FUNCTION = FunctionTool(name="")
"""Where none was given."""


class Tool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One entry of `tools`."""

    type: str
    function: FunctionTool = msgspec.field(default_factory=lambda: NO_FUNCTION)
    """Tools of other types, which are skipped, have none."""


class Thinking(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Whether the model is to reason, and how long; `adaptive` leaves it to its chat template."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None


class ChatRequest(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/chat/completions."""

    messages: list[Message]
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: JsonObject | None = None
    tools: list[Tool] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tool_choice: str | JsonObject | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    thinking: Thinking | None = None
    thinking_token_budget: int | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /tokenize, of a text or of a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: JsonObject | None = None
    tools: list[Tool] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]
