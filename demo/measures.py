# ruff: noqa: E501, SIM905 (tables of phrases and words)
"""Owns the questions on units and on dates, each with its short working.

Values are chosen so that the arithmetic stays within reach of a small model. A question is held out by its
units and value, or by the dates in it.
"""

from __future__ import annotations

import random
from datetime import date, timedelta

from .arithmetic import Fact, fact_key, product_steps
from .dialogue import Exchange, ask, roughen
from .holdout import draw, is_held_out

# (larger unit: singular, plural), (smaller unit: singular, plural), how many of the smaller make one of the larger
UNITS = [
    (("hour", "hours"), ("minute", "minutes"), 60),
    (("minute", "minutes"), ("second", "seconds"), 60),
    (("day", "days"), ("hour", "hours"), 24),
    (("week", "weeks"), ("day", "days"), 7),
    (("year", "years"), ("month", "months"), 12),
    (("decade", "decades"), ("year", "years"), 10),
    (("century", "centuries"), ("year", "years"), 100),
    (("metre", "metres"), ("centimetre", "centimetres"), 100),
    (("meter", "meters"), ("centimeter", "centimeters"), 100),
    (("centimetre", "centimetres"), ("millimetre", "millimetres"), 10),
    (("cm", "cm"), ("mm", "mm"), 10),
    (("m", "m"), ("cm", "cm"), 100),
    (("kilometre", "kilometres"), ("metre", "metres"), 1000),
    (("km", "km"), ("m", "m"), 1000),
    (("kilometer", "kilometers"), ("meter", "meters"), 1000),
    (("kilogram", "kilograms"), ("gram", "grams"), 1000),
    (("kg", "kg"), ("g", "g"), 1000),
    (("tonne", "tonnes"), ("kilogram", "kilograms"), 1000),
    (("litre", "litres"), ("millilitre", "millilitres"), 1000),
    (("liter", "liters"), ("milliliter", "milliliters"), 1000),
    (("foot", "feet"), ("inch", "inches"), 12),
    (("yard", "yards"), ("foot", "feet"), 3),
    (("pound", "pounds"), ("ounce", "ounces"), 16),
    (("gallon", "gallons"), ("quart", "quarts"), 4),
    (("byte", "bytes"), ("bit", "bits"), 8),
    (("kilobyte", "kilobytes"), ("byte", "bytes"), 1000),
    (("dozen", "dozen"), ("piece", "pieces"), 12),
    (("dollar", "dollars"), ("cent", "cents"), 100),
]
UNIT_FORMS = [
    "How many {to} are in {n} {of}?",
    "How many {to} are there in {n} {of}?",
    "Convert {n} {of} to {to}.",
    "{n} {of} in {to}?",
    "What is {n} {of} in {to}?",
    "How many {to} is {n} {of}?",
    "How many {to} make {n} {of}?",
    "{n} {of} to {to}",
    "Can you convert {n} {of} into {to}?",
    "How much is {n} {of} in {to}?",
    "Express {n} {of} in {to}.",
]
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()
LENGTHS = [31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31]


def _leaks(*facts: Fact) -> bool:
    """True when one of these facts is held out as an arithmetic question, so a working may not show it in training."""
    return any((key := fact_key(fact)) is not None and is_held_out(*key) for fact in facts)


def _named(count: int, unit: tuple[str, str]) -> str:
    return f"{count} {unit[0] if count == 1 else unit[1]}"


def unit_question(rng: random.Random, held_out: bool) -> Exchange:
    """A conversion to a smaller unit, or of a whole multiple to a larger one."""

    def sample(r: random.Random) -> tuple[int, int, bool]:
        while True:
            index, down = r.randrange(len(UNITS)), r.random() < 0.65
            factor = UNITS[index][2]
            count = r.randint(1, 99 if factor in (10, 100, 1000) else 30 if down else 12)
            if held_out or not _leaks(("*", count, factor), ("/", count * factor, factor)):
                return index, count, down

    index, count, down = draw(
        rng, held_out, sample, lambda s: ("unit", *s) if s[2] or UNITS[s[0]][2] in (10, 100, 1000) else None
    )
    large, small, factor = UNITS[index]
    total = count * factor
    form = rng.choice(UNIT_FORMS)
    if down:
        text = form.format(n=count, of=large[count != 1], to=small[1])
        steps = f"{product_steps(count, factor)}. " if count > 1 and factor not in (10, 100, 1000) else ""
        reply = f"1 {large[0]} is {_named(factor, small)}. {steps}So {_named(count, large)} = {_named(total, small)}."
        return ask("unit", roughen(rng, text, True), reply, f"= {_named(total, small)}.")
    text = form.format(n=total, of=small[1], to=large[1])
    steps = f"{total} ÷ {factor} = {count}. " if count > 1 and factor not in (10, 100, 1000) else ""
    reply = f"1 {large[0]} is {_named(factor, small)}. {steps}So {_named(total, small)} = {_named(count, large)}."
    return ask("unit", roughen(rng, text, True), reply, f"= {_named(count, large)}.")


def temperature_question(rng: random.Random, held_out: bool) -> Exchange:
    """Celsius to Fahrenheit for multiples of five, and back (training only: there are few of them)."""
    c, forward = 5 * rng.randint(-4, 24), rng.random() < 0.6
    f, nine = c * 9 // 5 + 32, c * 9 // 5
    if forward:
        forms = [
            "Convert {} degrees Celsius to Fahrenheit.",
            "What is {}°C in Fahrenheit?",
            "How many degrees Fahrenheit is {} Celsius?",
            "{} C in F?",
            "{} celsius to fahrenheit",
        ]
        reply = f"{c} × 9 ÷ 5 = {nine}, {nine} + 32 = {f}. So {c}°C = {f}°F."
        return ask("unit", roughen(rng, rng.choice(forms).format(c), True), reply, f"= {f}°F.")
    forms = [
        "Convert {} degrees Fahrenheit to Celsius.",
        "What is {}°F in Celsius?",
        "How many degrees Celsius is {} Fahrenheit?",
        "{} F in C?",
        "{} fahrenheit to celsius",
    ]
    reply = f"{f} - 32 = {nine}, {nine} × 5 ÷ 9 = {c}. So {f}°F = {c}°C."
    return ask("unit", roughen(rng, rng.choice(forms).format(f), True), reply, f"= {c}°C.")


def weekday_question(rng: random.Random, held_out: bool) -> Exchange:
    """The day some days after or before a day of the week."""

    def sample(r: random.Random) -> tuple[int, int]:
        return r.randrange(7), r.choice((1, -1)) * (1 if r.random() < 0.15 else r.randint(1, 30))

    start, step = draw(rng, held_out, sample, lambda s: ("weekday", *s) if abs(s[1]) > 1 else None)
    name, end, n = DAYS[start], DAYS[(start + step) % 7], abs(step)
    side = "after" if step > 0 else "before"
    if n == 1:
        forms = ["What day comes {s} {d}?", "Which day is {s} {d}?", "What is the day {s} {d}?"]
        return ask(
            "date", roughen(rng, rng.choice(forms).format(s=side, d=name)), f"The day {side} {name} is {end}.", end
        )
    forms = [
        "What day is {n} days {s} {d}?",
        "Which day of the week is {n} days {s} {d}?",
        "Today is {d}. What day {is_} {n} days {t}?",
        "What weekday comes {n} days {s} a {d}?",
    ]
    later = {"after": ("is it in", ""), "before": ("was it", " ago")}[side]
    form = rng.choice(forms)
    if "{is_}" in form:
        text = f"Today is {name}. What day {later[0]} {n} days{later[1]}?"
    else:
        text = form.format(n=n, s=side, d=name)
    rest = n % 7
    steps = f"{n} days is {n // 7} weeks and {rest} days. " if n >= 7 else ""
    if rest:
        way = 1 if step > 0 else -1
        steps += ", ".join(DAYS[(start + way * i) % 7] for i in range(rest + 1)) + ". "
    return ask("date", roughen(rng, text), f"{steps}{n} days {side} {name} is {end}.", end)


def _sample_date(rng: random.Random) -> date:
    return date(1990, 1, 1) + timedelta(days=rng.randrange(365 * 60))


def _spoken(rng: random.Random, day: date) -> str:
    month = MONTHS[day.month - 1]
    return rng.choice([f"{day.day} {month} {day.year}", f"{month} {day.day}, {day.year}"])


def iso_question(rng: random.Random, held_out: bool) -> Exchange:
    """A date written out, wanted as YYYY-MM-DD."""
    day = draw(rng, held_out, _sample_date, lambda d: ("iso", d.isoformat()))
    forms = [
        "Write {} as YYYY-MM-DD.",
        "What is {} in ISO format?",
        "Convert {} to YYYY-MM-DD",
        "{} in ISO 8601?",
        "Give me {} in the format YYYY-MM-DD.",
    ]
    text = rng.choice(forms).format(_spoken(rng, day))
    return ask("date", roughen(rng, text, True), day.isoformat(), day.isoformat())


def _shift_facts(start: date, step: int) -> list[Fact]:
    """The sums and differences that the working of a shift shows."""
    end, n = start + timedelta(days=step), abs(step)
    first: Fact = ("+" if step > 0 else "-", start.day, n)
    if end.month == start.month:
        return [first]
    if step > 0:
        return [first, ("-", start.day + n, start.day + n - end.day)]
    return [first, ("+", start.day - n, end.day - start.day + n)]


def shift_question(rng: random.Random, held_out: bool) -> Exchange:
    """The date a few days after or before a date; the working names the length of the month where it is crossed."""

    def sample(r: random.Random) -> tuple[date, int]:
        while True:
            start, step = _sample_date(r), r.choice((1, 1, -1)) * r.randint(1, 20)
            if held_out or not _leaks(*_shift_facts(start, step)):
                return start, step

    day, step = draw(rng, held_out, sample, lambda s: ("shift", s[0].isoformat(), s[1]))
    end, n = day + timedelta(days=step), abs(step)
    side = "after" if step > 0 else "before"
    month, target = MONTHS[day.month - 1], MONTHS[end.month - 1]
    unit = "day" if n == 1 else "days"
    text = rng.choice(
        ["What date is {n} {u} {s} {d}?", "Which date is {n} {u} {s} {d}?", "What is the date {n} {u} {s} {d}?"]
    )
    text = text.format(n=n, u=unit, s=side, d=_spoken(rng, day))
    if end.month == day.month:
        steps = f"{day.day} {'+' if step > 0 else '-'} {n} = {end.day}. "
    elif step > 0:
        length = (date(end.year, end.month, 1) - date(day.year, day.month, 1)).days
        steps = f"{month} {day.year} has {length} days. {day.day} + {n} = {day.day + n}, {day.day + n} - {length} = {end.day}. "
    else:
        length = (date(day.year, day.month, 1) - date(end.year, end.month, 1)).days
        steps = f"{target} {end.year} has {length} days. {day.day} - {n} = {day.day - n}, {day.day - n} + {length} = {end.day}. "
    final = f"{end.day} {target} {end.year}"
    return ask("date", roughen(rng, text), f"{steps}The date is {final}.", final)


def _month_length(rng: random.Random, held_out: bool) -> Exchange:
    month, year = draw(rng, held_out, lambda r: (r.randrange(12), r.randint(1990, 2049)), lambda s: ("month", *s))
    leap = year % 4 == 0
    days = LENGTHS[month] + (month == 1 and leap)
    text = rng.choice(
        ["How many days does {m} {y} have?", "How many days are in {m} {y}?", "How long is {m} {y} in days?"]
    )
    reason = f"{year} is {'a' if leap else 'not a'} leap year, so " if month == 1 else ""
    reply = f"{reason}{MONTHS[month]} {year} has {days} days."
    return ask("date", roughen(rng, text.format(m=MONTHS[month], y=year)), reply, f"has {days} days")


def calendar_question(rng: random.Random, held_out: bool) -> Exchange:
    """Lengths of months, leap years, and the order of months."""
    which = rng.random()
    if which < 0.35 or (held_out and which > 0.7):
        return _month_length(rng, held_out)
    if which < 0.7:
        year = draw(rng, held_out, lambda r: r.randint(1904, 2096), lambda y: ("leap", y))
        text = rng.choice(["Is {} a leap year?", "Was {} a leap year?", "Tell me whether {} is a leap year."]).format(
            year
        )
        if year == 2000 or year % 100:
            parts = f"{year} is divisible by 4" if year % 4 == 0 else f"{year} is not divisible by 4"
        else:
            parts = f"{year} is divisible by 100 but not by 400"
        leap = year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)
        answer = f"{'Yes' if leap else 'No'}, {year} is {'a' if leap else 'not a'} leap year"
        return ask("date", roughen(rng, text), f"{answer}: {parts}.", answer)
    month, after = rng.randrange(12), rng.random() < 0.5
    side, end = ("after", MONTHS[(month + 1) % 12]) if after else ("before", MONTHS[(month - 1) % 12])
    text = rng.choice(["Which month comes {} {}?", "What month is {} {}?"]).format(side, MONTHS[month])
    return ask("date", roughen(rng, text), f"The month {side} {MONTHS[month]} is {end}.", end)


UNIT_GENERATORS = [(unit_question, 85), (temperature_question, 15)]
DATE_GENERATORS = [(weekday_question, 30), (iso_question, 20), (shift_question, 30), (calendar_question, 20)]
