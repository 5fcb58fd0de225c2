"""The Harmony format in tokens: where a prompt leaves the model, and how many tokens of an answer are reasoning.

Does not own heads nor the reader (`harmony.py`). Invariant: only marks that are tokens of their own count, since their
mere characters are somebody's text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from quire.text.cursor import Unfinished
from quire.text.harmony import CHANNEL, CONSTRAIN, ENDS, MESSAGE, ROLE, START, TURN_ENDS, head_at

if TYPE_CHECKING:  # `quire chat` imports no tokenizer before it loads one
    from quire.text.tokenizer import HfTokenizer

MAX_HEAD_TOKENS: Final = 64
"""More tokens than this without `<|message|>` are no head."""


def has_mark_tokens(tokenizer: HfTokenizer) -> bool:
    """Whether each mark that an answer needs is a control token."""
    marks = (START, CHANNEL, CONSTRAIN, MESSAGE, ENDS[0])
    return all(tokenizer.token_id(mark) in tokenizer.special_ids for mark in marks)


def turn_ends(tokenizer: HfTokenizer) -> tuple[int, ...]:
    """The control tokens that end a turn."""
    found = [tokenizer.token_id(mark) for mark in TURN_ENDS]
    return tuple(one for one in found if one is not None and one in tokenizer.special_ids)


def begun_in(prompt: list[int], tokenizer: HfTokenizer) -> str:
    """What the prompt says of the message that it leaves open, behind its role; mostly nothing."""
    open_ids = _open_message(prompt, tokenizer)
    return tokenizer.decode(open_ids, skip_special_tokens=False).removeprefix(ROLE)


def _open_message(prompt: list[int], tokenizer: HfTokenizer) -> list[int]:
    start_id = tokenizer.token_id(START)
    if start_id is None or start_id not in prompt:
        return []
    found = prompt[len(prompt) - prompt[::-1].index(start_id) :]
    ends = {tokenizer.token_id(mark) for mark in ENDS}
    return [] if ends.intersection(found) else found


class HarmonyCount:
    """Counts the tokens of reasoning in one output. prompt: before it."""

    def __init__(self, prompt: list[int], tokenizer: HfTokenizer) -> None:
        self._tokenizer = tokenizer
        self._special_ids = tokenizer.special_ids
        self._message_id = tokenizer.token_id(MESSAGE)
        self._begin_ids = {tokenizer.token_id(START), tokenizer.token_id(CHANNEL)}
        self._end_ids = {tokenizer.token_id(mark) for mark in ENDS}
        self._head: list[int] | None = []
        """Of the message that begins; None inside one."""
        self._is_reasoning = False
        self._n_tokens = 0
        self.feed(_open_message(prompt, tokenizer))
        self._n_tokens = 0

    @property
    def n_tokens(self) -> int:
        """Tokens of reasoning in what was fed."""
        return self._n_tokens

    def feed(self, token_ids: Sequence[int]) -> None:
        """The next tokens of the output."""
        for token_id in token_ids:
            if self._head is None:
                self._go_on(token_id)
            elif token_id == self._message_id:
                self._is_reasoning, self._head = self._says_reasoning([*self._head, token_id]), None
            else:
                self._head.append(token_id)
                if len(self._head) > MAX_HEAD_TOKENS:
                    self._is_reasoning, self._head = False, None

    def _go_on(self, token_id: int) -> None:
        if token_id in self._begin_ids:
            self._head = [token_id]
        elif token_id in self._end_ids:
            self._is_reasoning = False
        elif token_id not in self._special_ids:
            self._n_tokens += self._is_reasoning

    def _says_reasoning(self, head_ids: list[int]) -> bool:
        text = self._tokenizer.decode(head_ids, skip_special_tokens=False).removeprefix(ROLE)
        try:
            head = head_at(text, 0, is_first=True)
        except Unfinished:
            return False
        return head is not None and head.is_reasoning
