"""How long a text may be before anybody counts its tokens. Owns that limit."""

from __future__ import annotations

from quire.core.errors import ContextLengthExceeded

MAX_CHARS_PER_TOKEN = 64
"""No ordinary text has longer tokens on average; a longer prompt is refused before it is tokenized."""


def check_length(n_chars: int, max_model_len: int, param: str) -> None:
    """Refuse a text that cannot fit the context, before it is tokenized. Raises ContextLengthExceeded."""
    if n_chars > max_model_len * MAX_CHARS_PER_TOKEN:
        raise ContextLengthExceeded(
            f"{param} has {n_chars} characters: a context of {max_model_len} tokens cannot hold more than "
            f"{max_model_len * MAX_CHARS_PER_TOKEN}",
            param=param,
        )


def too_many_tokens(n_tokens: int, most: int, read: str = "") -> str:
    """What is said of a prompt that is too long. read: the part of it that has these tokens, where that is not all."""
    return f"the prompt has {n_tokens} tokens{read}, but at most {most} can be taken: shorten it"


def with_context(said: str, max_model_len: int) -> str:
    """The same with its reason, where that is the context."""
    return f"{said}. This model's context holds {max_model_len} tokens, at least one of them for output"
