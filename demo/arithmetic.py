# ruff: noqa: E501, SIM905 (tables of phrases and words)
"""Owns the arithmetic questions: sums, differences, products, quotients, comparisons and small word problems.

Every fact (operation and operands) passes the held-out split, wherever it appears. A product of two numbers of
two digits is answered with its working, tens and ones apart, because a small model cannot do it in one go.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable

from .dialogue import Exchange, ask, roughen
from .holdout import draw

PHRASES = {
    "+": [
        "What is {a} + {b}?", "What's {a} plus {b}?", "{a} + {b}", "{a}+{b}", "{a} + {b} = ?", "{a}+{b}=", "Add {a} and {b}.",
        "Calculate {a} + {b}.", "How much is {a} plus {b}?", "Compute {a} + {b}", "Can you add {a} to {b}?",
        "What is the sum of {a} and {b}?", "What do you get if you add {b} to {a}?", "{a} plus {b} is?",
        "Tell me {a} + {b}.", "whats {a} + {b}", "{a} and {b} added?", "what's {a}+{b}", "I need the total of {a} and {b}.", "How much do {a} and {b} make together?",
    ],
    "-": [
        "What is {a} - {b}?", "What's {a} minus {b}?", "{a} - {b}", "{a}-{b}", "{a} - {b} = ?", "{a}-{b}=", "Subtract {b} from {a}.",
        "Calculate {a} - {b}.", "How much is {a} minus {b}?", "Compute {a} - {b}", "Can you take {b} away from {a}?",
        "What is the difference between {a} and {b}?", "What is left if I take {b} from {a}?", "{a} less {b} is?", "whats {a} - {b}", "what's {a}-{b}",
    ],
    "*": [
        "What is {a} * {b}?", "What's {a} times {b}?", "{a} * {b}", "{a}*{b}", "{a} x {b}", "{a} × {b}", "{a} × {b} = ?", "{a}x{b}=",
        "Multiply {a} by {b}.", "Calculate {a} * {b}.", "How much is {a} times {b}?", "Compute {a} × {b}",
        "What is the product of {a} and {b}?", "Can you multiply {a} and {b}?", "{a} times {b} is?", "What is {a} x {b}?", "whats {a} * {b}", "what's {a}*{b}",
    ],
    "/": [
        "What is {a} / {b}?", "What's {a} divided by {b}?", "{a} / {b}", "{a}/{b}", "{a} ÷ {b}", "{a} / {b} = ?", "Divide {a} by {b}.",
        "Calculate {a} / {b}.", "How much is {a} divided by {b}?", "Compute {a} ÷ {b}", "How many times does {b} go into {a}?",
    ],
}  # fmt: skip
SIGNS = {"+": "+", "-": "-", "*": "×", "/": "÷"}
BARE = [
    "Answer with just the number.", "Just the number, please.", "Only give the number.", "Reply with the number only.",
    "Give only the result.", "Number only.",
]  # fmt: skip
BARE_SYSTEMS = ["Answer with the number only.", "You are a calculator. Reply with the number only."]
KEYS = ["result", "answer", "value", "sum", "total", "output", "number"]

Fact = tuple[str, int, int]


def fact_key(fact: Fact) -> tuple[object, ...] | None:
    """The name of a fact in the split, or None where the fact belongs to training only.

    Workings show products with a round factor or one of a single digit, and sums with 32 (Fahrenheit): only training.
    Quotients come from the small times tables, which are learned whole.
    """
    sign, a, b = fact
    if sign == "/":
        return None
    if sign == "*" and (a < 10 or b < 10 or a % 10 == 0 or b % 10 == 0):
        return None
    if sign in "+-" and 32 in (a, b):
        return None
    if sign in "+*":
        a, b = min(a, b), max(a, b)
    return ("fact", sign, a, b)


def value_of(fact: Fact) -> int:
    """The result; a quotient is rounded down."""
    sign, a, b = fact
    return {"+": a + b, "-": a - b, "*": a * b}[sign] if sign != "/" else a // b


def _number(rng: random.Random, digits: int) -> int:
    return rng.randint(0 if digits == 1 else 10 ** (digits - 1), 10**digits - 1)


def sample_fact(rng: random.Random, sign: str | None = None) -> Fact:
    """A random fact, mostly with operands of two digits."""
    sign = sign or rng.choices("+-*/", (34, 30, 26, 10))[0]
    if sign == "/":
        b, quotient = rng.randint(2, 12), rng.randint(1, 20)
        rest = 0 if rng.random() < 0.75 else rng.randrange(b)
        return sign, b * quotient + rest, b
    if sign == "*":
        a_digits, b_digits = rng.choices(((2, 2), (1, 1), (2, 1), (1, 2)), (65, 15, 12, 8))[0]
    else:
        a_digits, b_digits = rng.choices(((2, 2), (1, 1), (2, 1), (1, 2), (3, 3), (3, 2)), (62, 6, 6, 4, 12, 10))[0]
    a, b = _number(rng, a_digits), _number(rng, b_digits)
    return _ordered(rng, sign, a, b)


def _ordered(rng: random.Random, sign: str, a: int, b: int) -> Fact:
    """The fact, most differences turned so that they are not negative."""
    return (sign, b, a) if sign == "-" and a < b and rng.random() < 0.7 else (sign, a, b)


def sample_two_digit(rng: random.Random) -> Fact:
    """A sum, difference or product of two numbers of two digits."""
    return rng.choice("+-*"), rng.randint(10, 99), rng.randint(10, 99)


def product_steps(a: int, b: int) -> str:
    """A product as equations: tens and ones of `b` apart when both have two digits and neither is round."""
    if a < 10 or b < 10 or a % 10 == 0 or b % 10 == 0:
        return f"{a} × {b} = {a * b}"
    tens, ones = b // 10 * 10, b % 10
    return f"{a} × {tens} = {a * tens}, {a} × {ones} = {a * ones}, {a * tens} + {a * ones} = {a * b}"


def worked(fact: Fact) -> str:
    """The reply in full: the equation, with its working for long products and its remainder for quotients."""
    sign, a, b = fact
    if sign == "*":
        steps = product_steps(a, b)
        return steps + "." if steps.count("=") == 1 else f"{steps}. So {a} × {b} = {a * b}."
    if sign == "/" and a % b:
        return f"{a} ÷ {b} = {a // b} remainder {a % b}."
    return f"{a} {SIGNS[sign]} {b} = {value_of(fact)}."


def _fact(rng: random.Random, held_out: bool, sample: Callable[[random.Random], Fact]) -> Fact:
    return draw(rng, held_out, sample, fact_key)


def _sum_or_difference(held_out: bool) -> Callable[[random.Random], Fact]:
    """Held-out tasks keep to two digits, since longer sums also occur inside the workings of training."""
    if held_out:
        return lambda r: _ordered(r, r.choice("+-"), r.randint(10, 99), r.randint(10, 99))
    return lambda r: sample_fact(r, r.choice("+-"))


def question(rng: random.Random, held_out: bool, sample: Callable[[random.Random], Fact] = sample_fact) -> Exchange:
    """A plain question, answered with the equation."""
    fact = _fact(rng, held_out, sample)
    text = roughen(rng, rng.choice(PHRASES[fact[0]]).format(a=fact[1], b=fact[2]))
    return ask("arithmetic", text, worked(fact), value_of(fact))


def bare_question(rng: random.Random, held_out: bool) -> Exchange:
    """A question that wants the number alone (sums, differences and small products)."""
    fact = _fact(rng, held_out, _sum_or_difference(held_out))
    text = rng.choice(PHRASES[fact[0]]).format(a=fact[1], b=fact[2])
    reply = str(value_of(fact))
    if rng.random() < 0.5:
        return ask("arithmetic", roughen(rng, text), reply, reply, rng.choice(BARE_SYSTEMS))
    text = text + (" " if text[-1] in "?." else ". ") + rng.choice(BARE)
    return ask("arithmetic", roughen(rng, text), reply, reply)


def json_question(rng: random.Random, held_out: bool) -> Exchange:
    """A question whose answer is wanted as JSON under a given key."""
    fact = _fact(rng, held_out, _sum_or_difference(held_out))
    key = rng.choice(KEYS)
    text = rng.choice(PHRASES[fact[0]]).format(a=fact[1], b=fact[2])
    reply = json.dumps({key: value_of(fact)})
    wish = rng.choice(
        [f'Reply with JSON with the key "{key}".', f"Answer as a JSON object with the key {key}.", f"Respond in JSON: {{\"{key}\": ...}}",
         f"Return JSON with one key: {key}.", f"Give the answer as JSON, key {key}."]
    )  # fmt: skip
    if rng.random() < 0.4:
        return ask("json", roughen(rng, text), reply, json.loads(reply), wish)
    return ask("json", roughen(rng, text + (" " if text[-1] in "?." else ". ") + wish, True), reply, json.loads(reply))


STORIES = [
    ("+", "{n} has {a} {t} and gets {b} more. How many {t} does {n} have now?", "{n} now has {r} {t}."),
    (
        "+",
        "There are {a} {t} in one box and {b} in another. How many {t} are there in all?",
        "There are {r} {t} in all.",
    ),
    (
        "+",
        "{n} bought {a} {t} on Monday and {b} on Tuesday. How many {t} is that together?",
        "That is {r} {t} together.",
    ),
    ("-", "{n} has {a} {t} and gives away {b}. How many {t} are left?", "{r} {t} are left."),
    ("-", "There were {a} {t} on the table. {n} took {b}. How many {t} remain?", "{r} {t} remain."),
    ("-", "{n} needs {a} {t} and has {b}. How many {t} are missing?", "{r} {t} are missing."),
    ("*", "{n} buys {a} boxes with {b} {t} each. How many {t} is that?", "That is {r} {t}."),
    ("*", "There are {a} rows of {b} {t}. How many {t} are there?", "There are {r} {t}."),
    ("/", "{n} shares {a} {t} equally among {b} friends. How many {t} does each get?", "Each gets {r} {t}."),
]
THINGS = "apples pears books coins stickers cards marbles pencils stamps cookies eggs flowers shells tickets".split()
PEOPLE = "Anna Ben Clara David Emma Finn Grace Hugo Ida Jonas Kim Lena Max Nora Omar Paul Rosa Sam Tara Tom".split()


def story(rng: random.Random, held_out: bool) -> Exchange:
    """A word problem."""
    sign, template, ending = rng.choice([s for s in STORIES if s[0] in "+-"] if held_out else STORIES)

    def sample(r: random.Random) -> Fact:
        if sign == "/":
            b, each = r.randint(2, 12), r.randint(2, 12)
            return sign, b * each, b
        top = 20 if sign == "*" else 99
        a, b = r.randint(2, top), r.randint(2, 9 if sign == "*" else 99)
        return (sign, max(a, b), min(a, b)) if sign == "-" else (sign, a, b)

    fact = _fact(rng, held_out, sample)
    words = {"n": rng.choice(PEOPLE), "t": rng.choice(THINGS), "a": fact[1], "b": fact[2], "r": value_of(fact)}
    return ask("arithmetic", template.format(**words), worked(fact) + " " + ending.format(**words), value_of(fact))


def comparison(rng: random.Random, held_out: bool) -> Exchange:
    """Which of two numbers is larger or smaller."""

    def sample(r: random.Random) -> tuple[int, int]:
        a = _number(r, r.choice((1, 2, 2, 2, 3)))
        b = _number(r, len(str(a)) if r.random() < 0.7 else r.choice((1, 2, 3)))
        return (a, b) if a != b else (a, a + 1)

    a, b = draw(rng, held_out, sample, lambda pair: ("compare", min(pair), max(pair)))
    if rng.random() < 0.6:
        word, pick = rng.choice(("larger", "bigger", "greater")), max(a, b)
    else:
        word, pick = rng.choice(("smaller", "less")), min(a, b)
    forms = [
        "Which is {w}, {a} or {b}?",
        "Which number is {w}: {a} or {b}?",
        "What is {w}, {a} or {b}?",
        "{a} or {b}: which is {w}?",
    ]
    text = rng.choice(forms).format(w=word, a=a, b=b)
    return ask("arithmetic", roughen(rng, text), f"{pick} is {word} than {a + b - pick}.", pick)


def follow_up(rng: random.Random, held_out: bool) -> Exchange:
    """A sum or difference, and then one more step on its result (training only: both facts pass the split)."""
    first = question(rng, held_out, lambda r: sample_fact(r, r.choice("+-")))
    start = first.answer
    sign, b = draw(
        rng, False, lambda r: (r.choice("+-"), r.randint(1, 30)), lambda s: fact_key((s[0], start, s[1]))
    )  # fmt: skip
    words = {
        "+": ["Now add {b}.", "And plus {b}?", "Add {b} to that."],
        "-": ["Now subtract {b}.", "And minus {b}?", "Take away {b}."],
    }
    fact = (sign, start, b)
    first.messages.append({"role": "user", "content": roughen(rng, rng.choice(words[sign]).format(b=b))})
    first.messages.append({"role": "assistant", "content": worked(fact)})
    first.answer = value_of(fact)
    return first


def chain(rng: random.Random, held_out: bool) -> Exchange:
    """Three numbers with two signs, worked from the left (training only: both facts pass the split)."""
    first = _fact(rng, False, lambda r: (r.choice("+-"), r.randint(1, 99), r.randint(1, 99)))
    start = value_of(first)
    second = draw(rng, False, lambda r: (r.choice("+-"), start, r.randint(1, 60)), fact_key)
    text = f"{first[1]} {first[0]} {first[2]} {second[0]} {second[2]}"
    steps = f"{first[1]} {first[0]} {first[2]} = {start}, {start} {second[0]} {second[2]} = {value_of(second)}"
    form = rng.choice(["What is {}?", "{}", "Calculate {}.", "How much is {}?", "{} = ?", "Compute {}"])
    question_text = roughen(rng, form.format(text if rng.random() < 0.7 else text.replace(" ", "")))
    return ask("arithmetic", question_text, f"{steps}. So {text} = {value_of(second)}.", value_of(second))


GENERATORS = [
    (question, 46),
    (bare_question, 17),
    (json_question, 11),
    (story, 11),
    (comparison, 6),
    (follow_up, 4),
    (chain, 5),
]
