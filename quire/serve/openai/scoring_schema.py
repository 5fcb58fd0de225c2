"""The JSON bodies of /v1/score, /rerank and /pooling, as types, by vLLM's names; None types are known and refused.

Owns names and types. Ranges and combinations are checked in `scoring.py` and `pooling.py`.
"""

from __future__ import annotations

import msgspec

Texts = str | list[str]


class _Compared(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What requests that compare texts have in common."""

    model: str
    priority: int | None = None
    cache_salt: str | None = None
    user: str | None = None
    use_activation: bool | None = None
    # Known, not honoured: see `decoding.REASONS`.
    truncate_prompt_tokens: None = None
    max_tokens_per_query: None = None
    max_tokens_per_doc: None = None
    mm_processor_kwargs: None = None
    chat_template: None = None


class ScoreRequest(_Compared, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/score: two sets of texts, under one of four pairs of names."""

    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None
    items: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None


class RerankDocument(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A text in the form that answers have."""

    text: str


class RerankRequest(_Compared, kw_only=True, forbid_unknown_fields=True):
    """POST /rerank, /v1/rerank and /v2/rerank, as Jina's and Cohere's clients send it."""

    query: str
    documents: list[str | RerankDocument]
    top_n: int | None = None
    return_documents: bool | None = None


class PoolingRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /pooling: the vectors of prompts."""

    model: str
    input: str | list[str | int | list[int]] | None = None
    task: str | None = None
    encoding_format: str | None = None
    pooling: str | None = None
    normalize: bool | None = None
    use_activation: bool | None = None
    add_special_tokens: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    user: str | None = None
    messages: None = None
    chat_template: None = None
    truncate_prompt_tokens: None = None
    dimensions: int | None = None
