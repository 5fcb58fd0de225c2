"""Log-probabilities in the two shapes of the OpenAI API and in vLLM's for prompts. Owns no arithmetic.

Invariants: every number is finite JSON; two tokens with the same text keep the larger value in a dict keyed by text.
"""

from __future__ import annotations

from typing import Any

from quire.core.outputs import Logprob
from quire.serve.schema import JsonObject
from quire.text.tokenizer import HfTokenizer

Row = dict[int, Logprob]
"""Token id → Logprob; the token that stands there comes first."""

FLOOR = -9999.0
"""Stands for minus infinity, which JSON cannot say; OpenAI's own value."""


class TokenNames:
    """How tokens are called in an answer: by their text, or as `token_id:N` when asked for or without a tokenizer."""

    def __init__(self, tokenizer: HfTokenizer | None, as_ids: bool) -> None:
        self._tokenizer = None if as_ids else tokenizer

    def text(self, token_id: int) -> str:
        """The name of a token."""
        return f"token_id:{token_id}" if self._tokenizer is None else self._tokenizer.token_text(token_id)

    def encoded(self, token_id: int) -> bytes:
        """The bytes that a token adds to the text; also when they are no whole character."""
        return self.text(token_id).encode() if self._tokenizer is None else self._tokenizer.token_bytes(token_id)


def value(entry: Logprob) -> float:
    """The log-probability as a finite number."""
    return max(entry.logprob, FLOOR)


def chat_logprobs(rows: list[Row], n_top: int, names: TokenNames) -> JsonObject:
    """`choices[].logprobs` of a chat answer: one entry a token, each with its `n_top` most probable tokens."""
    content = []
    for row in rows:
        chosen, entry = next(iter(row.items()))
        top = [pair for pair in row.items() if pair[1].rank is not None and pair[1].rank <= n_top]
        top.sort(key=lambda pair: -pair[1].logprob)
        alternatives = [_chat_entry(token_id, one, names) for token_id, one in top[:n_top]]
        content.append({**_chat_entry(chosen, entry, names), "top_logprobs": alternatives})
    return {"content": content, "refusal": None}


def _chat_entry(token_id: int, entry: Logprob, names: TokenNames) -> JsonObject:
    return {"token": names.text(token_id), "logprob": value(entry), "bytes": list(names.encoded(token_id))}


class TextLogprobs:
    """`choices[].logprobs` of a text completion, over one choice: offsets go on from piece to piece."""

    def __init__(self, names: TokenNames) -> None:
        self._names = names
        self._offset = 0

    def piece(self, token_ids: list[int], rows: list[Row | None]) -> JsonObject:
        """Columns for these tokens. A None row (the first prompt token) has no values."""
        tokens = [self._names.text(token_id) for token_id in token_ids]
        values: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for token_id, text, row in zip(token_ids, tokens, rows, strict=True):
            values.append(None if row is None else value(row[token_id]))
            tops.append(None if row is None else self._top(row))
            offsets.append(self._offset)
            self._offset += len(text)
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}

    def _top(self, row: Row) -> dict[str, float]:
        top: dict[str, float] = {}
        for token_id, entry in row.items():
            text = self._names.text(token_id)
            top[text] = max(top.get(text, FLOOR), value(entry))
        return top


def joined(pieces: list[JsonObject]) -> JsonObject:
    """Pieces of one choice as one object."""
    return {name: [item for piece in pieces for item in piece[name]] for name in pieces[0]}


def prompt_rows(rows: list[Row | None], names: TokenNames) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: one dict a prompt token, token id → values; the first is null."""
    return [
        None if row is None else {str(key): _prompt_entry(key, one, names) for key, one in row.items()} for row in rows
    ]


def _prompt_entry(token_id: int, entry: Logprob, names: TokenNames) -> JsonObject:
    return {"logprob": value(entry), "rank": entry.rank, "decoded_token": names.text(token_id)}
