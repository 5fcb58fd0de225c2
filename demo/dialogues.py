"""Owns the mixture: dialogues of one to five exchanges over all topics, and the held-out tasks that measure them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

from . import arithmetic, calls, extraction, measures, smalltalk
from .chat import render
from .dialogue import Exchange, Message

Generator = Callable[[random.Random, bool], Exchange]

TOPICS: list[tuple[Sequence[tuple[Generator, int]], int]] = [
    (arithmetic.GENERATORS, 36),
    (measures.UNIT_GENERATORS, 7),
    (measures.DATE_GENERATORS, 9),
    (extraction.GENERATORS, 23),
    (calls.GENERATORS, 11),
    (smalltalk.GENERATORS, 14),
]
SYSTEMS = [
    "You are a helpful assistant.",
    "You are a helpful assistant.",
    "You are Quire's demo model.",
    "Be brief.",
    "You are a friendly assistant.",
    "You are an assistant that answers questions.",
    "Answer the user's questions.",
    "You are a helpful, honest assistant.",
    "You are a chatbot.",
]

# Each held-out task: the generator, and how its answer is compared (a key of `evaluate.COMPARE`).
TASKS: dict[str, tuple[Generator, str]] = {
    "two-digit arithmetic": (lambda r, h: arithmetic.question(r, h, arithmetic.sample_two_digit), "last number"),
    "two-digit addition": (
        lambda r, h: arithmetic.question(r, h, lambda q: ("+", q.randint(10, 99), q.randint(10, 99))),
        "last number",
    ),
    "two-digit subtraction": (
        lambda r, h: arithmetic.question(r, h, lambda q: ("-", q.randint(10, 99), q.randint(10, 99))),
        "last number",
    ),
    "two-digit multiplication": (
        lambda r, h: arithmetic.question(r, h, lambda q: ("*", q.randint(10, 99), q.randint(10, 99))),
        "last number",
    ),
    "number-only arithmetic": (arithmetic.bare_question, "equal"),
    "word problems": (arithmetic.story, "last number"),
    "comparisons": (arithmetic.comparison, "first number"),
    "units": (measures.unit_question, "contains"),
    "dates: ISO format": (measures.iso_question, "contains"),
    "dates: shift by days": (measures.shift_question, "contains"),
    "dates: weekday after days": (measures.weekday_question, "last weekday"),
    "JSON extraction: free text": (extraction.hobby, "json"),
    "JSON extraction: any keys": (extraction.attributes, "json"),
    "JSON extraction": (extraction.extraction, "json"),
    "JSON arithmetic": (arithmetic.json_question, "json"),
    "tool call": (calls.call, "call"),
    "tool result": (calls.call_and_answer, "equal"),
}


def _pick(rng: random.Random, generators: Sequence[tuple[Generator, int]]) -> Generator:
    return rng.choices([g for g, _ in generators], [w for _, w in generators])[0]


def exchange(rng: random.Random) -> Exchange:
    """A training exchange on a random topic."""
    topic = rng.choices([t for t, _ in TOPICS], [w for _, w in TOPICS])[0]
    return _pick(rng, topic)(rng, False)


def conversation(rng: random.Random) -> str:
    """The text of one training dialogue. A system's wish or a list of functions holds for the whole dialogue."""
    first = exchange(rng)
    messages: list[Message] = list(first.messages)
    system = first.system
    if system is None and rng.random() < 0.25:
        system = rng.choice(SYSTEMS)
    if first.system is None and first.tools == [] and rng.random() < 0.4:
        for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 4))):
            more = exchange(rng)
            if more.system is None and not more.tools:
                messages += more.messages
    elif first.system is None and first.kind == "tool result" and rng.random() < 0.15:
        messages += smalltalk.talk(rng, False).messages
    if system is not None:
        messages = [{"role": "system", "content": system}, *messages]
    return render(messages, first.tools or None)


def conversations(seed: int, n: int) -> Iterator[str]:
    """`n` training dialogues, the same for the same seed."""
    rng = random.Random(seed)
    return (conversation(rng) for _ in range(n))


def task_examples(name: str, n: int, seed: int = 7) -> list[Exchange]:
    """`n` held-out exchanges of a task; the last assistant message is the wanted reply."""
    generator = TASKS[name][0]
    rng = random.Random(f"{name} {seed}")
    return [generator(rng, True) for _ in range(n)]


def prompt_of(example: Exchange) -> str:
    """The text up to and including the opening of the last reply."""
    messages = example.messages[:-1]
    if example.system is not None:
        messages = [{"role": "system", "content": example.system}, *messages]
    return render(messages, example.tools or None, add_generation_prompt=True)
