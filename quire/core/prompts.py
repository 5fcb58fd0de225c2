"""Prompts as Python code gives them, by vLLM's names. Types alone; `engine/input_processor` checks what is in them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Final, NotRequired, TypedDict, Union

ROLES: Final = ("system", "developer", "user", "assistant", "tool")
"""Of messages, over HTTP and from Python. Templates make marks of them, as `'<|' + message.role + '|>'`; they know
`developer`, OpenAI's newer name, as `system`."""


class TextPrompt(TypedDict):
    """A prompt that is a text."""

    prompt: str
    cache_salt: NotRequired[str]
    """Prefix pages are shared only between prompts of equal salts."""


class TokensPrompt(TypedDict):
    """A prompt that is tokenized already."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]
    """The text of the token ids, where it is known; it is shown and not read."""
    cache_salt: NotRequired[str]


PromptType = Union[str, Sequence[int], TextPrompt, TokensPrompt]
"""One prompt: a text, token ids (a list, an array or a tensor), or one of these with a salt."""

Prompts = Union[str, TextPrompt, TokensPrompt, Sequence[Union[int, Collection[Any]]]]
"""One `PromptType`, or several. Of a list that mixes them checkers join the items to the nearest type that all have,
which is a Collection; a second Sequence in this union would keep them from that."""
