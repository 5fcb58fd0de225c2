"""The JSON bodies of Ollama's API, as types; None types are known and refused.

Owns names and types; ranges and combinations are checked where a body becomes a conversation (`input.py`).
Invariant: unknown fields are errors; an explicit null means the same as leaving the field out.
"""

from __future__ import annotations

from typing import Any

import msgspec

from quire.serve.openai.schema import ChoiceFields, JsonObject, Tool


class OllamaOptions(ChoiceFields, kw_only=True, forbid_unknown_fields=True):
    """Sampling, and settings of Ollama's own runner (`unused.py`)."""

    num_predict: int | None = None
    num_ctx: int | None = None
    stop: str | list[str] | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    typical_p: float | None = None
    tfs_z: float | None = None
    mirostat: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    penalize_newline: bool | None = None
    num_keep: int | None = None
    num_batch: int | None = None
    num_gpu: int | None = None
    main_gpu: int | None = None
    num_thread: int | None = None
    draft_num_predict: int | None = None
    numa: bool | None = None
    low_vram: bool | None = None
    f16_kv: bool | None = None
    logits_all: bool | None = None
    vocab_only: bool | None = None
    use_mmap: bool | None = None
    use_mlock: bool | None = None
    embedding_only: bool | None = None


class OllamaFunctionCall(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A call that the model made. Its arguments are an object, decoded once their length is known to be sane."""

    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"{}")
    index: int | None = None
    description: str | None = None


class OllamaToolCall(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A call in a turn of the assistant. Clients leave its id out: results come in the order of the calls, or by
    name."""

    function: OllamaFunctionCall
    id: str | None = None
    type: str | None = None


class OllamaMessage(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One turn."""

    role: str
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None
    tool_calls: list[OllamaToolCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class _Generating(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What both generating endpoints take."""

    model: str
    stream: bool | None = None
    options: OllamaOptions | None = None
    format: JsonObject | str | None = None
    keep_alive: float | str | None = None
    think: bool | str | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


class OllamaChatRequest(_Generating, kw_only=True, forbid_unknown_fields=True):
    """POST /api/chat."""

    messages: list[OllamaMessage] | None = None
    tools: list[Tool] | None = None
    truncate: bool | None = None
    shift: bool | None = None


class OllamaGenerateRequest(_Generating, kw_only=True, forbid_unknown_fields=True):
    """POST /api/generate."""

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    template: str | None = None
    context: list[int] | None = None
    raw: bool | None = None
    images: list[str] | None = None
    truncate: bool | None = None
    shift: bool | None = None
    width: int | None = None
    height: int | None = None
    steps: int | None = None


class OllamaEmbedRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /api/embed."""

    model: str
    input: str | list[str] | None = None
    truncate: bool | None = None
    dimensions: int | None = None
    options: OllamaOptions | None = None
    keep_alive: float | str | None = None


class OllamaEmbeddingsRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /api/embeddings, of older clients."""

    model: str
    prompt: str | None = None
    options: OllamaOptions | None = None
    keep_alive: float | str | None = None


class OllamaShowRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /api/show; older clients say `name`."""

    model: str | None = None
    name: str | None = None
    verbose: bool | None = None
    system: str | None = None
    template: str | None = None
    options: dict[str, Any] | None = None
