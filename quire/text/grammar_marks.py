"""Marks in the text of a Lark grammar: as text, or as the control tokens that they are."""

from __future__ import annotations

from quire.text.grammar import quoted
from quire.text.tokenizer import HfTokenizer
from quire.text.tool_calls import MARK


def literal(text: str, tokenizer: HfTokenizer) -> str:
    """A mark, or a text without one."""
    token = tokenizer.token_id(text)
    return f"<[{token}]>" if token is not None and token in tokenizer.special_ids else quoted(text)


def written(text: str, tokenizer: HfTokenizer) -> str:
    """A text with the marks in it."""
    parts, at = [], 0
    for found in MARK.finditer(text):
        parts += [text[at : found.start()], found.group()]
        at = found.end()
    return " ".join(literal(part, tokenizer) for part in (*parts, text[at:]) if part)
