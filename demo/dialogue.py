"""Owns the plain values that the generators make: an exchange, and a dialogue of one or more exchanges."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]


@dataclass
class Exchange:
    """A user's question and all that follows until the assistant has answered it.

    `answer` is what a checker compares the last reply with; `system` is set where the task needs one.
    """

    kind: str
    messages: list[Message]
    answer: Any = None
    system: str | None = None
    tools: list[dict[str, Any]] = field(default_factory=list)


def ask(kind: str, question: str, reply: str, answer: Any = None, system: str | None = None) -> Exchange:
    """An exchange of one question and one reply."""
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": reply}]
    return Exchange(kind, messages, reply if answer is None else answer, system)


OPENINGS = ["Hi, ", "Hello, ", "Hey, ", "Hi! ", "Hello! ", "Please, ", "Ok, ", "Okay, ", "So, ", "Quick question: "]
CLOSINGS = [" Thanks!", " Thank you.", " please", " Please."]


def roughen(rng: random.Random, text: str, keep_case: bool = False) -> str:
    """The same question as people type it: sometimes lower case, no final mark, a greeting before it."""
    if not keep_case and rng.random() < 0.3:
        text = text.lower()
    if rng.random() < 0.25 and text[-1:] in "?.!":
        text = text[:-1]
    if rng.random() < 0.12:
        text = rng.choice(OPENINGS) + (text if keep_case or not text[:2].istitle() else text[:1].lower() + text[1:])
    if rng.random() < 0.06 and text[-1:] in "?.!":
        text += rng.choice(CLOSINGS)
    return text
