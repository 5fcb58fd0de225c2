"""Owns the tool-call dialogues: which of the offered functions to call, with what, and what to say of its result.

Names of functions and parameters are sometimes changed, so the model must read the list instead of remembering it.
"""

from __future__ import annotations

import json
import random
from typing import Any

from .dialogue import Exchange, Message, roughen
from .functions import FUNCTIONS, Arguments, Function, invented
from .holdout import is_held_out
from .vocabulary import full_name, made_up

SYNONYMS = {
    "city": ["city", "city", "location", "place", "town"],
    "minutes": ["minutes", "duration", "mins"],
    "time": ["time", "at", "when"],
    "query": ["query", "q", "search_term", "text"],
    "to": ["to", "recipient", "contact"],
    "text": ["text", "message", "content"],
    "amount": ["amount", "value", "sum"],
    "from_currency": ["from_currency", "source", "from"],
    "to_currency": ["to_currency", "target", "to"],
    "origin": ["origin", "from", "start"],
    "destination": ["destination", "to", "end"],
    "symbol": ["symbol", "ticker", "stock"],
    "order_id": ["order_id", "order", "id"],
    "word": ["word", "term"],
    "people": ["people", "guests", "party_size"],
    "task": ["task", "item", "title"],
}
REFUSALS = [
    "I have no function for that.",
    "None of my functions can do that.",
    "I cannot do that with the functions I have.",
]
FALLBACK = [
    ("Hello!", "Hello! How can I help you?"),
    ("Hi", "Hello! How can I help you?"),
    ("Thanks!", "You are welcome!"),
    ("Thank you", "You are welcome!"),
    ("Who are you?", "I am the demo model of Quire. I can call the functions that you give me."),
]
# Parameters that are offered but never needed
OPTIONAL: list[tuple[str, dict[str, Any]]] = [
    ("unit", {"type": "string", "enum": ["celsius", "fahrenheit"]}),
    ("language", {"type": "string"}),
    ("limit", {"type": "integer"}),
    ("verbose", {"type": "boolean"}),
    ("format", {"type": "string", "enum": ["short", "long"], "description": "How to answer"}),
]


class Offer:
    """A function as it is offered in one dialogue: with its own spelling of names."""

    def __init__(self, rng: random.Random, function: Function) -> None:
        self.function = function
        self.name = function.name
        if rng.random() < 0.2:
            head, _, tail = function.name.partition("_")
            self.name = rng.choice(
                [
                    f"{tail}_{head}",
                    head + tail.title().replace("_", ""),
                    f"{function.name}_v2",
                    f"my_{function.name}",
                    f"{made_up(rng).lower()}_{tail}",
                ]
            )
        rename = rng.random() < 0.35
        self.keys = {p: rng.choice(SYNONYMS.get(p, [p])) if rename else p for p in function.parameters}
        if len(set(self.keys.values())) < len(self.keys):
            self.keys = {p: p for p in function.parameters}

        self.extra = rng.choice(OPTIONAL) if rng.random() < 0.2 else None

    def schema(self, bare: bool) -> dict[str, Any]:
        """The definition as a client sends it; `bare` leaves out the descriptions of the parameters."""
        properties: dict[str, Any] = {
            self.keys[p]: {"type": kind} if bare else {"type": kind, "description": about}
            for p, (kind, about) in self.function.parameters.items()
        }
        if self.extra and self.extra[0] not in properties:
            properties[self.extra[0]] = self.extra[1]
        parameters = {"type": "object", "properties": properties, "required": list(self.keys.values())}
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.function.about, "parameters": parameters},
        }

    def call(self, arguments: Arguments) -> Arguments:
        """The call for these arguments under the offered names."""
        return {"name": self.name, "arguments": {self.keys[p]: value for p, value in arguments.items()}}


def _offers(rng: random.Random, held_out: bool) -> list[Offer]:
    known = rng.sample(FUNCTIONS, rng.choices((1, 2, 3, 4), (50, 32, 12, 6))[0])
    return [Offer(rng, invented(rng, held_out) if rng.random() < 0.3 else f) for f in known]


def _flat(result: Arguments) -> Arguments:
    """The result with the first flight, if any, spread out, for the formats of `says`."""
    flights = result.get("flights")
    return {**result, **flights[0]} if flights else result


def _request(rng: random.Random, function: Function, held_out: bool) -> tuple[str, Arguments]:
    """A question for this function, and its arguments. Phrase and arguments together name the example."""
    while True:
        arguments = function.make(rng, held_out)
        number = rng.randrange(len(function.asks))
        text = function.asks[number].format(**arguments)
        if is_held_out("call", function.name, number, sorted(arguments.items())) == held_out:
            return roughen(rng, text, True), arguments


def _assistant_call(calls: list[Arguments]) -> Message:
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": call} for call in calls],
    }


def _system(rng: random.Random) -> str | None:
    return (
        rng.choice(
            [
                "You are a helpful assistant.",
                "You are a helpful assistant with access to functions.",
                "Use the functions to help the user.",
            ]
        )
        if rng.random() < 0.3
        else None
    )


def _asked(
    rng: random.Random, offers: list[Offer], held_out: bool
) -> tuple[list[Message], Arguments, Offer, Arguments]:
    """A question and its call; the call, the function that was chosen, and the arguments under their own names."""
    offer = rng.choice(offers)
    text, arguments = _request(rng, offer.function, held_out)
    wanted = offer.call(arguments)
    return [{"role": "user", "content": text}, _assistant_call([wanted])], wanted, offer, arguments


def call(rng: random.Random, held_out: bool) -> Exchange:
    """One call; it ends there, so the call is what a checker compares."""
    offers = _offers(rng, held_out)
    messages, wanted, _, _ = _asked(rng, offers, held_out)
    bare = rng.random() < 0.6
    return Exchange("tool call", messages, wanted, _system(rng), [o.schema(bare) for o in offers])


def _answered(rng: random.Random, offers: list[Offer], held_out: bool) -> tuple[list[Message], str]:
    """A question, its call, the result, and the sentence that tells the user; that sentence."""
    messages, _, offer, arguments = _asked(rng, offers, held_out)
    result = offer.function.result(rng, arguments)
    said = offer.function.says.format(**{**arguments, **_flat(result)})
    first = next(iter(result.values()))
    plain = len(result) == 1 and isinstance(first, (int, float, str)) and rng.random() < 0.2
    content = str(first) if plain else json.dumps(result, ensure_ascii=False)
    return [*messages, {"role": "tool", "content": content}, {"role": "assistant", "content": said}], said


def call_and_answer(rng: random.Random, held_out: bool) -> Exchange:
    """One to three calls, one after the other, each with its result and answer; in training sometimes thanks."""
    offers = _offers(rng, held_out)
    messages, said = _answered(rng, offers, held_out)
    kind = "tool result"
    while not held_out and rng.random() < 0.2:
        more, said = _answered(rng, offers, False)
        messages += more
    if not held_out and rng.random() < 0.15:
        messages += [
            {"role": "user", "content": roughen(rng, "Thank you!")},
            {"role": "assistant", "content": "You are welcome!"},
        ]
    bare = rng.random() < 0.6
    return Exchange(kind, messages, said, _system(rng), [o.schema(bare) for o in offers])


def two_calls(rng: random.Random, held_out: bool) -> Exchange:
    """The same function asked for two things at once."""
    name = rng.choice(("get_weather", "get_time", "get_order_status", "get_stock_price"))
    function = next(f for f in FUNCTIONS if f.name == name)
    offer = Offer(rng, function)
    _, first = _request(rng, function, held_out)
    _, second = _request(rng, function, held_out)
    one, two = next(iter(first.values())), next(iter(second.values()))
    forms = {
        "get_weather": ["What is the weather in {} and in {}?", "Weather in {} and {}?"],
        "get_time": ["What time is it in {} and in {}?", "Tell me the time in {} and {}."],
        "get_order_status": ["Where are my orders {} and {}?", "What is the status of {} and {}?"],
        "get_stock_price": ["What are the prices of {} and {}?", "Stock prices of {} and {}?"],
    }
    text = rng.choice(forms[function.name]).format(one, two)
    calls = [offer.call(first), offer.call(second)]
    others = [Offer(rng, f) for f in rng.sample(FUNCTIONS, 2) if f is not function]
    tools = [o.schema(True) for o in [offer, *others]]
    rng.shuffle(tools)
    return Exchange(
        "two calls", [{"role": "user", "content": text}, _assistant_call(calls)], calls, _system(rng), tools
    )


def no_call(rng: random.Random, held_out: bool) -> Exchange:
    """Functions are offered, but the message needs none of them or asks for another."""
    offers = _offers(rng, held_out)
    offered = {o.function.name for o in offers}
    if rng.random() < 0.5:
        text, reply = rng.choice(FALLBACK)
    elif rng.random() < 0.3:
        first, last = full_name(rng)
        text, reply = f"My name is {first} {last}.", f"Nice to meet you, {first}!"
    else:
        other = rng.choice([f for f in FUNCTIONS if f.name not in offered])
        text, _ = _request(rng, other, False)
        return Exchange(
            "no call",
            [{"role": "user", "content": text}, {"role": "assistant", "content": REFUSALS[0]}],
            REFUSALS[0],
            _system(rng),
            [o.schema(True) for o in offers],
        )
    messages = [{"role": "user", "content": roughen(rng, text, True)}, {"role": "assistant", "content": reply}]
    return Exchange("no call", messages, reply, _system(rng), [o.schema(True) for o in offers])


GENERATORS = [(call, 54), (call_and_answer, 31), (two_calls, 6), (no_call, 9)]
