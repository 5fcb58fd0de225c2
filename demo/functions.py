# ruff: noqa: E501, SIM905 (tables of phrases and words)
"""Owns the functions that generated dialogues can call: what each is for, how people ask, what it returns."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .vocabulary import CITIES, FIRST, PRODUCTS, code, made_up

Arguments = dict[str, Any]


@dataclass(frozen=True)
class Function:
    """A callable tool. `asks` and `says` are formats over the arguments and, for `says`, over the result."""

    name: str
    about: str
    parameters: dict[str, tuple[str, str]]  # name: (JSON type, description)
    asks: tuple[str, ...]
    make: Callable[[random.Random, bool], Arguments]
    result: Callable[[random.Random, Arguments], Arguments]
    says: str


def _city(rng: random.Random, held: bool) -> str:
    return made_up(rng, held) if held or rng.random() < 0.3 else rng.choice(CITIES)


def _person(rng: random.Random, held: bool) -> str:
    return made_up(rng, held) if held or rng.random() < 0.3 else rng.choice(FIRST)


def _word(rng: random.Random, held: bool) -> str:
    return made_up(rng, held).lower() if held or rng.random() < 0.5 else rng.choice(PRODUCTS)


def _clock(rng: random.Random) -> str:
    return f"{rng.randint(6, 22):02d}:{rng.choice(('00', '15', '30', '45'))}"


WEATHER = ["sunny", "cloudy", "rainy", "windy", "foggy", "snowy", "clear"]
CURRENCIES = ["USD", "EUR", "GBP", "JPY", "CHF", "SEK", "CAD", "AUD", "INR", "BRL"]
LANGUAGES = [
    "French",
    "German",
    "Spanish",
    "Italian",
    "Japanese",
    "Dutch",
    "Polish",
    "Swedish",
    "Portuguese",
    "Turkish",
]
ROOMS = ["kitchen", "bedroom", "living room", "bathroom", "office", "hall", "garage", "garden"]
TASKS = [
    "buy milk",
    "call the bank",
    "water the plants",
    "pay the rent",
    "clean the car",
    "send the report",
    "book a flight",
    "feed the cat",
]
SYMBOLS = ["AAPL", "MSFT", "NVDA", "TSLA", "AMZN", "GOOG", "META", "IBM", "INTC", "AMD"]


def _exchange(rng: random.Random, held: bool) -> Arguments:
    source, target = rng.sample(CURRENCIES, 2)
    return {"amount": rng.randint(1, 999), "from_currency": source, "to_currency": target}


def _trip(rng: random.Random, held: bool) -> Arguments:
    return {"origin": _city(rng, held), "destination": _city(rng, held)}


FUNCTIONS = [
    Function("get_weather", "Get the current weather in a city.", {"city": ("string", "The city")},
        ("What is the weather in {city}?", "How is the weather in {city} today?", "Weather in {city}", "Is it raining in {city}?",
         "Tell me the weather in {city}.", "What's it like outside in {city}?", "Do I need an umbrella in {city}?"),
        lambda r, h: {"city": _city(r, h)},
        lambda r, a: {"city": a["city"], "temperature": r.randint(-9, 38), "condition": r.choice(WEATHER)},
        "It is {condition} in {city}, with a temperature of {temperature} degrees."),
    Function("get_time", "Get the current local time in a city.", {"city": ("string", "The city")},
        ("What time is it in {city}?", "What's the time in {city}?", "Current time in {city}?", "Tell me the time in {city}.", "How late is it in {city}?"),
        lambda r, h: {"city": _city(r, h)}, lambda r, a: {"time": _clock(r)}, "It is {time} in {city}."),
    Function("convert_currency", "Convert an amount of money to another currency.",
        {"amount": ("number", "The amount"), "from_currency": ("string", "Code to convert from"), "to_currency": ("string", "Code to convert to")},
        ("Convert {amount} {from_currency} to {to_currency}.", "How much is {amount} {from_currency} in {to_currency}?",
         "What are {amount} {from_currency} worth in {to_currency}?", "{amount} {from_currency} in {to_currency}?"),
        _exchange, lambda r, a: {"result": r.randint(1, 99999) / 100}, "{amount} {from_currency} is {result} {to_currency}."),
    Function("set_timer", "Start a timer.", {"minutes": ("integer", "Length in minutes")},
        ("Set a timer for {minutes} minutes.", "Start a {minutes} minute timer.", "Timer, {minutes} minutes please.", "Remind me in {minutes} minutes."),
        lambda r, h: {"minutes": r.randint(1, 180)}, lambda r, a: {"status": "started"}, "The timer is set for {minutes} minutes."),
    Function("set_alarm", "Set an alarm.", {"time": ("string", "Time as HH:MM")},
        ("Wake me up at {time}.", "Set an alarm for {time}.", "I need an alarm at {time}.", "Alarm at {time} please."),
        lambda r, h: {"time": _clock(r)}, lambda r, a: {"status": "set"}, "The alarm is set for {time}."),
    Function("send_message", "Send a text message to a contact.", {"to": ("string", "The contact"), "text": ("string", "The message")},
        ("Tell {to} that {text}.", "Send a message to {to}: {text}", "Text {to}: {text}", "Message {to} and say {text}."),
        lambda r, h: {"to": _person(r, h), "text": r.choice(["I am late", "dinner is ready", "I am on my way", "the meeting is moved",
            "I will call later", "happy birthday", f"the code is {r.randint(100, 9999)}", f"we meet at {_clock(r)}"])},
        lambda r, a: {"status": "sent"}, "I sent the message to {to}."),
    Function("search_web", "Search the web.", {"query": ("string", "What to search for")},
        ("Search the web for {query}.", "Look up {query} online.", "Find information about {query}.", "Search for {query}", "Google {query}."),
        lambda r, h: {"query": f"{_word(r, h)}" + r.choice(["", " reviews", " price", " history", " repair"])},
        lambda r, a: {"results": [f"All about {a['query']}", f"{a['query']} guide"]}, "I found: All about {query}; {query} guide."),
    Function("get_stock_price", "Get the price of a stock.", {"symbol": ("string", "The ticker symbol")},
        ("What is the price of {symbol}?", "How is {symbol} stock doing?", "Stock price of {symbol}?", "What does a share of {symbol} cost?"),
        lambda r, h: {"symbol": "".join(r.choice("ABCDEFGHIKLMNPRSTVXYZ") for _ in range(r.choice((3, 4)))) if h or r.random() < 0.5 else r.choice(SYMBOLS)},
        lambda r, a: {"price": r.randint(100, 99999) / 100}, "{symbol} is at {price}."),
    Function("translate", "Translate a text to another language.", {"text": ("string", "The text"), "language": ("string", "Target language")},
        ("Translate '{text}' to {language}.", "How do you say '{text}' in {language}?", "What is '{text}' in {language}?"),
        lambda r, h: {"text": r.choice(["good morning", "thank you", "how are you", "where is the station"]) if r.random() < 0.4 and not h else _word(r, h),
            "language": r.choice(LANGUAGES)},
        lambda r, a: {"translation": made_up(r).lower()}, "In {language}, '{text}' is '{translation}'."),
    Function("get_order_status", "Look up the status of an order.", {"order_id": ("string", "The order number")},
        ("Where is my order {order_id}?", "What is the status of order {order_id}?", "Has order {order_id} been shipped?", "Track order {order_id}."),
        lambda r, h: {"order_id": code(r, h)}, lambda r, a: {"status": r.choice(["shipped", "delivered", "processing", "cancelled", "delayed"])},
        "Your order {order_id} is {status}."),
    Function("set_light", "Switch the light in a room.", {"room": ("string", "The room"), "state": ("string", "on or off")},
        ("Turn {state} the light in the {room}.", "Switch the {room} light {state}.", "Lights {state} in the {room}.", "Please turn the {room} lamp {state}."),
        lambda r, h: {"room": r.choice(ROOMS), "state": r.choice(["on", "off"])}, lambda r, a: {"status": "ok"}, "The light in the {room} is {state}."),
    Function("play_music", "Play music of an artist.", {"artist": ("string", "The artist")},
        ("Play something by {artist}.", "Play music by {artist}.", "I want to hear {artist}.", "Put on some {artist}."),
        lambda r, h: {"artist": (_person(r, h) + " " + made_up(r, h)) if r.random() < 0.5 else made_up(r, h)},
        lambda r, a: {"status": "playing"}, "Now playing {artist}."),
    Function("book_table", "Book a table in a restaurant.",
        {"restaurant": ("string", "The restaurant"), "people": ("integer", "How many people"), "time": ("string", "Time as HH:MM")},
        ("Book a table for {people} at {restaurant} at {time}.", "Reserve a table at {restaurant} for {people} people at {time}.",
         "I want to eat at {restaurant} at {time}, we are {people}."),
        lambda r, h: {"restaurant": made_up(r, h), "people": r.randint(2, 12), "time": _clock(r)},
        lambda r, a: {"confirmed": True}, "Your table for {people} at {restaurant} is booked for {time}."),
    Function("add_task", "Add a task to the to-do list.", {"task": ("string", "The task")},
        ("Add '{task}' to my list.", "Put '{task}' on my to-do list.", "New task: {task}", "Add a task: {task}"),
        lambda r, h: {"task": f"buy a {_word(r, h)}" if h or r.random() < 0.5 else r.choice(TASKS)},
        lambda r, a: {"status": "added"}, "I added '{task}' to your list."),
    Function("get_distance", "Get the distance between two cities.", {"origin": ("string", "First city"), "destination": ("string", "Second city")},
        ("How far is it from {origin} to {destination}?", "What is the distance between {origin} and {destination}?", "Distance from {origin} to {destination}?"),
        _trip, lambda r, a: {"km": r.randint(10, 9000)}, "It is {km} km from {origin} to {destination}."),
    Function("find_flights", "Find flights between two cities.", {"origin": ("string", "From"), "destination": ("string", "To")},
        ("Find flights from {origin} to {destination}.", "I want to fly from {origin} to {destination}.", "Is there a flight from {origin} to {destination}?"),
        _trip, lambda r, a: {"flights": [{"time": _clock(r), "price": r.randint(40, 900)}]}, "There is a flight from {origin} to {destination} at {time} for {price}."),
    Function("define_word", "Look up a word in the dictionary.", {"word": ("string", "The word")},
        ("What does {word} mean?", "Define {word}.", "What is the meaning of {word}?", "Look up the word {word}."),
        lambda r, h: {"word": _word(r, h)}, lambda r, a: {"definition": f"a kind of {r.choice(PRODUCTS)}"}, "'{word}' means {definition}."),
    Function("roll_dice", "Roll dice.", {"sides": ("integer", "Sides of each die"), "count": ("integer", "How many dice")},
        ("Roll {count} dice with {sides} sides.", "Throw {count} {sides}-sided dice.", "Roll {count}d{sides}."),
        lambda r, h: {"sides": r.choice([4, 6, 8, 10, 12, 20]), "count": r.randint(1, 9)}, lambda r, a: {"total": r.randint(1, 60)}, "The total is {total}."),
]  # fmt: skip

VERBS = "start stop open close update create delete show list check move copy rename clean build test load save count print scan lock reset".split()
OBJECTS = "door window file user account report server robot engine pump valve camera table image video group project device job page label".split()
FIELDS = "name size speed level id color value mode count label user target path group amount title key limit position code".split()


def invented(rng: random.Random, held: bool) -> Function:
    """A function that no one knows, so that its list entry has to be read."""
    verb, noun = rng.choice(VERBS), rng.choice(OBJECTS) if rng.random() < 0.6 else made_up(rng, held).lower()
    names = rng.sample(FIELDS, rng.randint(1, 3))
    if held or rng.random() < 0.3:
        names[0] = made_up(rng, held).lower()
    parameters = {n: ("integer" if rng.random() < 0.4 else "string", f"The {n} of the {noun}") for n in names}

    def make(r: random.Random, h: bool) -> Arguments:
        return {n: r.randint(0, 999) if kind == "integer" else _word(r, h) for n, (kind, _) in parameters.items()}

    told = " and ".join(f"{n} {{{n}}}" for n in names)
    name = rng.choice((f"{verb}_{noun}", f"{noun}_{verb}", f"{verb}{noun.capitalize()}", f"{noun}.{verb}"))
    about = f"{verb.capitalize()} a {noun}."
    asks = (
        f"{verb.capitalize()} the {noun} with {told}.",
        f"Please {verb} a {noun}: {told}",
        f"Call {name} with {told}.",
        f"{verb.capitalize()} {noun}, {told}",
    )
    return Function(
        name, about, parameters, asks, make, lambda r, a: {"status": "done"}, "Done: " + about[:-1].lower() + "."
    )
