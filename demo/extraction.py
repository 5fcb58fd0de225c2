# ruff: noqa: E501, SIM905 (tables of phrases and words)
"""Owns JSON extraction: a sentence, the keys or the schema that is wanted, and the object that answers it.

The keys of a record are drawn from synonyms and in any order, so that the model copies the keys it is asked for.
A wanted key that the sentence does not answer becomes null.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

from .dialogue import Exchange, ask
from .measures import DAYS, MONTHS
from .vocabulary import COLOURS, COMPANIES, JOBS, PRODUCTS, STREETS, code, full_name, made_up, place

Record = dict[str, Any]

SYNONYMS = {
    "name": ["name", "name", "name", "full_name", "person", "fullName", "who"],
    "age": ["age", "age", "age", "years", "age_years"],
    "city": ["city", "city", "town", "location", "place", "home"],
    "job": ["job", "job", "profession", "occupation", "role", "work"],
    "company": ["company", "company", "employer", "firm", "organisation"],
    "email": ["email", "email", "mail", "email_address"],
    "phone": ["phone", "phone", "phone_number", "tel"],
    "product": ["product", "product", "item", "article", "thing"],
    "quantity": ["quantity", "quantity", "count", "amount", "number"],
    "price": ["price", "price", "cost", "price_eur", "unit_price"],
    "order": ["order_id", "order_id", "order", "id", "order_number"],
    "colour": ["color", "color", "colour"],
    "date": ["date", "date", "day", "when"],
    "time": ["time", "time", "at", "start_time", "hour"],
    "event": ["event", "event", "title", "what", "meeting"],
    "from": ["from", "origin", "departure", "start"],
    "to": ["to", "destination", "arrival", "end"],
    "rating": ["rating", "rating", "stars", "score"],
    "sentiment": ["sentiment", "sentiment", "mood", "opinion"],
    "street": ["street", "street", "address", "road"],
}
TYPES = {"age": "integer", "quantity": "integer", "price": "number", "rating": "integer"}


@dataclass(frozen=True)
class Scene:
    """Sentences over the same fields. A field that a sentence leaves out is null when it is asked for."""

    fields: tuple[str, ...]
    sentences: tuple[str, ...]


SCENES = [
    Scene(("name", "age", "city"), (
        "{name} is {age} years old and lives in {city}.", "{name}, {age}, lives in {city}.", "My name is {name}, I am {age} and I live in {city}.",
        "{name} from {city} turned {age} last week.", "I met {name} in {city}. They are {age}.", "Meet {name}: {age} years old, based in {city}.",
        "{name} moved to {city} at the age of {age}.", "{name} lives in {city}.", "{name} is {age}.")),
    Scene(("name", "job", "company", "city"), (
        "{name} works as a {job} at {company} in {city}.", "{name} is a {job} at {company}.", "I am {name}, a {job} from {city}.",
        "{company} hired {name} as a {job} for its office in {city}.", "{name}, {job} at {company}, is based in {city}.",
        "Our new {job} is {name}, who comes from {city}.", "{name} has been a {job} in {city} for years.")),
    Scene(("name", "email", "phone"), (
        "You can reach {name} at {email} or {phone}.", "{name}'s email is {email}.", "Contact: {name}, {email}, {phone}.",
        "Please write to {name} ({email}).", "Call {name} on {phone}.", "I'm {name}, my mail is {email} and my number is {phone}.")),
    Scene(("name", "product", "quantity", "price"), (
        "{name} bought {quantity} {product}s for {price} euros.", "{name} ordered {quantity} {product}s at {price} each.",
        "{quantity} {product}s at {price} euros each for {name}.", "Sold {quantity} {product}s to {name}.",
        "I would like {quantity} {product}s. My name is {name}.", "{name} paid {price} for {quantity} {product}s.")),
    Scene(("order", "product", "colour", "name"), (
        "Order {order} is a {colour} {product} for {name}.", "{name} wants a {colour} {product}, order number {order}.",
        "Please send order {order}, the {colour} {product}, to {name}.", "The {colour} {product} in order {order} is broken.",
        "Where is my {colour} {product}? The order is {order} and my name is {name}.")),
    Scene(("event", "date", "time", "city"), (
        "The {event} is on {date} at {time} in {city}.", "{event} on {date}, {time}, {city}.", "Join us for the {event} in {city} on {date}.",
        "We moved the {event} to {date} at {time}.", "Reminder: {event}, {date} at {time}.", "On {date} there is a {event} in {city}, starting at {time}.")),
    Scene(("name", "from", "to", "date"), (
        "{name} flies from {from} to {to} on {date}.", "Book a ticket from {from} to {to} for {name} on {date}.",
        "{name} takes the train from {from} to {to}.", "On {date} {name} travels from {from} to {to}.", "I need to go from {from} to {to} on {date}.")),
    Scene(("product", "rating", "sentiment"), (
        "The {product} is {praise}. {rating} out of 5 stars.", "I give this {product} {rating} stars, it is {praise}.",
        "{rating} stars: the {product} is {praise}.", "This {product} is {praise}!", "What a {praise} {product}. {rating}/5.")),
    Scene(("name", "street", "city", "phone"), (
        "{name} lives at {street} in {city}.", "Ship it to {name}, {street}, {city}.", "{name}, {street}, {city}, phone {phone}.",
        "My address is {street}, {city}. Regards, {name}.", "The shop of {name} is at {street}, {city}; call {phone}.")),
]  # fmt: skip
EVENTS = (
    "meeting workshop concert dinner party conference lecture picnic wedding webinar review interview training".split()
)
GOOD = "great excellent wonderful fantastic lovely perfect".split()
BAD = "terrible awful poor disappointing useless bad".split()

WISHES = [
    "Extract {keys} as JSON: {text}", "Extract the {keys} from this sentence as JSON: {text}", "{text} Give {keys} as JSON.",
    "Return a JSON object with the keys {keys}. {text}", "JSON with {keys}: {text}", "From the text below, extract {keys} as JSON.\n\n{text}",
    "Turn this into JSON with keys {keys}: {text}", "Extract JSON with keys {keys}.\nText: {text}", "{text}\n\nReply with JSON only. Keys: {keys}.",
    "Please extract {keys} from: \"{text}\" Answer in JSON.", "Parse this into a JSON object ({keys}): {text}", "{text} Answer in JSON with keys {keys}.",
    "Which {keys} does this name? Reply as JSON. {text}", "Read this and answer in JSON with the fields {keys}: {text}",
]  # fmt: skip
SYSTEM_WISHES = [
    "Extract {keys} from the message. Reply with a JSON object only.", "You extract data. Reply only with JSON with the keys {keys}.",
    "Answer in JSON with the keys {keys}.", "Return JSON with keys {keys}. No other text.", "You are a parser. Output a JSON object with {keys}.",
    "Reply with a JSON object that has the keys {keys}.", "Always answer in JSON. Keys: {keys}.",
]  # fmt: skip
SCHEMA_WISHES = [
    "Extract the data as JSON that matches this schema: {schema}\n\n{text}", "Reply with JSON matching the schema {schema}.\n{text}",
    "{text}\n\nAnswer with a JSON object for this JSON schema:\n{schema}", "Schema: {schema}\nText: {text}", "Use this JSON schema: {schema}\n{text}",
]  # fmt: skip
SCHEMA_SYSTEMS = [
    "Reply only with JSON that matches this schema: {schema}", "Extract data. Follow this JSON schema: {schema}",
    "You must answer with a JSON object that fits this schema:\n{schema}",
]  # fmt: skip


def _spell_date(rng: random.Random) -> str:
    day, month = rng.randint(1, 28), rng.choice(MONTHS)
    return rng.choice([
        f"{day} {month}", f"{month} {day}", f"{day} {month} {rng.randint(2020, 2029)}", rng.choice(DAYS),
        f"{rng.randint(2020, 2029)}-{MONTHS.index(month) + 1:02d}-{day:02d}",
    ])  # fmt: skip


def _values(rng: random.Random, scene: Scene, held_out: bool) -> Record:
    first, last = full_name(rng, held_out)
    rating = rng.randint(1, 5)
    good = rating >= 4
    makers = {
        "name": lambda: first if rng.random() < 0.35 and not held_out else f"{first} {last}",
        "age": lambda: rng.randint(3, 99), "city": lambda: place(rng), "job": lambda: rng.choice(JOBS),
        "company": lambda: rng.choice(COMPANIES) if rng.random() < 0.5 else made_up(rng, held_out),
        "email": lambda: f"{rng.choice((first, last, first + '.' + last, first[0] + last))}@"
        f"{made_up(rng, held_out)}.{rng.choice(('com', 'org', 'net', 'example', 'io'))}".lower(),
        "phone": lambda: f"{rng.choice(('+', '0', '0'))}{rng.randint(10, 999)}{rng.choice((' ', '-'))}{rng.randint(10000, 9999999)}",
        "product": lambda: rng.choice(PRODUCTS) if rng.random() < 0.7 else made_up(rng, held_out).lower(),
        "quantity": lambda: rng.randint(2, 99),
        "price": lambda: rng.randint(1, 500) if rng.random() < 0.5 else rng.randint(100, 50000) / 100,
        "order": lambda: code(rng, held_out), "colour": lambda: rng.choice(COLOURS), "date": lambda: _spell_date(rng),
        "time": lambda: f"{rng.randint(7, 22)}:{rng.choice(('00', '15', '30', '45'))}", "event": lambda: rng.choice(EVENTS),
        "from": lambda: place(rng), "to": lambda: place(rng), "rating": lambda: rating,
        "sentiment": lambda: "positive" if good else "negative",
        "street": lambda: f"{rng.randint(1, 199)} {rng.choice(STREETS)}",
    }  # fmt: skip
    values = {field: makers[field]() for field in scene.fields}
    if "sentiment" in values:
        values["praise"] = rng.choice(GOOD if good else BAD)
        if held_out:
            values["product"] = made_up(rng, True).lower()
    if held_out and "event" in scene.fields:
        values["city"] = made_up(rng, True)
    return values


def _listing(rng: random.Random, keys: list[str]) -> str:
    quoted = rng.choice(("{}", "{}", '"{}"', "`{}`"))
    names = [quoted.format(key) for key in keys]
    if len(names) > 1 and rng.random() < 0.6:
        return ", ".join(names[:-1]) + " and " + names[-1]
    return ", ".join(names)


def _schema(rng: random.Random, keys: list[str], types: list[str]) -> str:
    schema: Record = {"type": "object", "properties": {k: {"type": t} for k, t in zip(keys, types, strict=True)}}
    if rng.random() < 0.7:
        schema["required"] = keys
    if rng.random() < 0.2:
        schema["additionalProperties"] = False
    return json.dumps(schema, indent=2 if rng.random() < 0.15 else None)


@dataclass(frozen=True)
class Wish:
    """The fields of a scene that are asked for, each with the key and the JSON type it is asked under."""

    scene: Scene
    keys: dict[str, str]  # key: field

    @property
    def types(self) -> list[str]:
        """JSON types, in the order of the keys."""
        return [TYPES.get(field, "string") for field in self.keys.values()]


def _told(scene: Scene, sentence: str) -> list[str]:
    return [f for f in scene.fields if "{" + f + "}" in sentence or (f == "sentiment" and "{praise}" in sentence)]


def _wish(rng: random.Random, scene: Scene, sentence: str) -> Wish:
    """Keys for some or all of what the sentence tells, and now and then for something that it does not."""
    told = _told(scene, sentence)
    fields = rng.sample(told, rng.randint(1 if len(told) < 2 else 2, len(told))) if rng.random() < 0.6 else list(told)
    if rng.random() < 0.12:
        missing = [f for f in SYNONYMS if f not in scene.fields] + [f for f in scene.fields if f not in told] * 4
        fields.insert(rng.randint(0, len(fields)), rng.choice(missing))
    keys: dict[str, str] = {}
    for field in fields:
        key = rng.choice(SYNONYMS[field]) if rng.random() < 0.55 else SYNONYMS[field][0]
        if rng.random() < 0.04:
            key = key.upper() if rng.random() < 0.5 else key.capitalize()
        keys.setdefault(key, field)
    return Wish(scene, keys)


def _read(rng: random.Random, wish: Wish, sentence: str, held_out: bool) -> tuple[str, Record]:
    """The sentence filled with values, and the object that answers the wish."""
    values = _values(rng, wish.scene, held_out)
    told = _told(wish.scene, sentence)
    return sentence.format(**values), {key: values[f] if f in told else None for key, f in wish.keys.items()}


def _request(rng: random.Random, text: str, record: Record, types: list[str]) -> Exchange:
    """The exchange that asks for this record of this text: by keys or schema, in the user's message or the system's."""
    keys = list(record)
    if rng.random() < 0.2:
        filler = rng.choice(FILLERS)
        text = f"{filler} {text}" if rng.random() < 0.5 else f"{text} {filler}"
    kind = rng.random()
    question, system = text, None
    if kind < 0.45:
        question = rng.choice(WISHES).format(keys=_listing(rng, keys), text=text if rng.random() < 0.8 else f'"{text}"')
    elif kind < 0.72:
        system = rng.choice(SYSTEM_WISHES).format(keys=_listing(rng, keys))
    elif kind < 0.86:
        question = rng.choice(SCHEMA_WISHES).format(schema=_schema(rng, keys, types), text=text)
    else:
        system = rng.choice(SCHEMA_SYSTEMS).format(schema=_schema(rng, keys, types))
    return ask("json", question, json.dumps(record, ensure_ascii=False), record, system)


ATTRIBUTES = """height weight size width length colour flavour material brand model price speed power voltage capacity year country language genre
author title artist album duration temperature humidity pressure status priority category owner team league position score level rank version
format topic course room floor building station platform gate seat row species breed habitat diet dose patient diagnosis doctor ward account
balance currency bank branch invoice total tax discount supplier warehouse shelf batch weightclass engine fuel doors mileage""".split()
WHOLES = "car house book film song animal plant parcel invoice ticket machine room patient game team dish course bottle train server".split()
FILLERS = [
    "It was raining.", "Thanks a lot.", "Have a nice day.", "We talked for a while.", "That is all.", "Please check this soon.", "Yesterday was busy.",
    "I hope this helps.", "Everyone was happy.", "The sun was shining.", "Nobody knew why.", "Best regards.", "Dear team,", "Note:", "Good news:", "FYI:",
]  # fmt: skip
HOBBIES = [
    "plays chess",
    "likes tea",
    "collects stamps",
    "loves dogs",
    "speaks French",
    "paints",
    "runs every day",
    "has two sisters",
    "plays the piano",
]


def _free_value(rng: random.Random, held_out: bool) -> Any:
    kind = rng.random()
    if kind < 0.35:
        return rng.randint(0, 9999)
    if kind < 0.5:
        return made_up(rng, held_out).lower()
    return rng.choice(
        (rng.choice(COLOURS), made_up(rng, held_out), code(rng, held_out), rng.choice(JOBS), rng.choice(PRODUCTS))
    )


def attributes(rng: random.Random, held_out: bool) -> Exchange:
    """Any things with any attributes: keys that are words of the text, values next to them."""
    names = rng.sample(ATTRIBUTES, rng.randint(2, 5))
    if rng.random() < 0.3:
        names[0] = made_up(rng, held_out).lower()
    if held_out:
        names[1] = made_up(rng, True).lower()
    record = {name: _free_value(rng, held_out) for name in names}
    whole = rng.choice(WHOLES)
    style = rng.random()
    if style < 0.3:
        text = ", ".join(f"{k}: {v}" for k, v in record.items()) + "."
    elif style < 0.5:
        text = f"The {whole} has " + ", ".join(f"{k} {v}" for k, v in record.items()) + "."
    elif style < 0.7:
        text = " ".join(f"The {k} of the {whole} is {v}." for k, v in record.items())
    elif style < 0.85:
        text = "\n".join(f"{k.capitalize()}: {v}" for k, v in record.items())
    else:
        text = f"This {whole}: " + " and ".join(f"the {k} is {v}" for k, v in record.items()) + "."
    wanted = rng.sample(names, rng.randint(1, len(names))) if rng.random() < 0.6 else names
    answer = {k: record[k] for k in dict.fromkeys(wanted)}
    types = ["integer" if isinstance(v, int) else "string" for v in answer.values()]
    return _request(rng, text, answer, types)


def hobby(rng: random.Random, held_out: bool) -> Exchange:
    """A person in a free form, with things said that nobody asks for."""
    first, last = full_name(rng, held_out)
    name = first if rng.random() < 0.3 and not held_out else f"{first} {last}"
    values: Record = {"name": name, "age": rng.randint(3, 99), "city": place(rng), "job": rng.choice(JOBS)}
    told = rng.sample(("age", "city", "job"), rng.randint(1, 3))
    clauses = {"age": [f"is {values['age']}", f"is {values['age']} years old", f"turned {values['age']}"],
               "city": [f"lives in {values['city']}", f"comes from {values['city']}", f"moved to {values['city']}"],
               "job": [f"works as a {values['job']}", f"is a {values['job']}"]}  # fmt: skip
    said = [rng.choice(clauses[f]) for f in told]
    if rng.random() < 0.6:
        said.insert(rng.randint(0, len(said)), rng.choice(HOBBIES))
    text = f"{name} " + (", ".join(said[:-1]) + " and " + said[-1] if len(said) > 1 else said[0]) + "."
    fields = ["name", *told]
    rng.shuffle(fields)
    fields = fields[: rng.randint(1, len(fields))]
    answer = {rng.choice(SYNONYMS[f]): values[f] for f in fields}
    return _request(rng, text, answer, ["integer" if isinstance(v, int) else "string" for v in answer.values()])


def extraction(rng: random.Random, held_out: bool) -> Exchange:
    """A sentence and a wish for JSON, the wish in the user's message or in the system's (then for all messages)."""
    scene = rng.choice(SCENES)
    sentence = rng.choice(scene.sentences)
    wish = _wish(rng, scene, sentence)
    text, record = _read(rng, wish, sentence, held_out)
    exchange = _request(rng, text, record, wish.types)
    system = exchange.system
    while system and not held_out and rng.random() < 0.3:
        text, record = _read(rng, wish, rng.choice(scene.sentences), False)
        exchange.messages += ask("json", text, json.dumps(record, ensure_ascii=False)).messages
    return exchange


def invention(rng: random.Random, held_out: bool) -> Exchange:
    """A record made up on request, where there is no sentence to read (training only: any answer would do)."""
    scene = rng.choice([s for s in SCENES if "sentiment" not in s.fields])
    values = _values(rng, scene, False)
    record = {field: values[field] for field in rng.sample(scene.fields, rng.randint(2, len(scene.fields)))}
    forms = ["Give me a JSON object with {}.", "Make up an example record in JSON with the keys {}.", "Write JSON with {}.",
             "Show me an example of a JSON object with {}.", "Generate a JSON object with the keys {}."]  # fmt: skip
    question = rng.choice(forms).format(_listing(rng, list(record)))
    return ask("invention", question, json.dumps(record, ensure_ascii=False), record)


def schema_chat(rng: random.Random, held_out: bool) -> Exchange:
    """A schema given only by the system and an everyday question that has to be answered inside it."""
    key = rng.choice(["answer", "reply", "message", "text", "response"])
    system = rng.choice(SYSTEM_WISHES[2:] + SCHEMA_SYSTEMS)
    system = system.format(keys=_listing(rng, [key]), schema=_schema(rng, [key], ["string"]))
    pairs = [("Hello!", "Hello! How can I help you?"), ("Hi", "Hello! How can I help you?"), ("Who are you?", "I am Quire's demo model."),
             ("What is your name?", "I am Quire's demo model."), ("Thank you", "You are welcome!"), ("How are you?", "I am fine, thank you.")]  # fmt: skip
    question, reply = rng.choice(pairs)
    return ask("invention", question, json.dumps({key: reply}), {key: reply}, system)


GENERATORS = [(extraction, 50), (attributes, 28), (hobby, 12), (invention, 6), (schema_chat, 4)]
