"""JSON in pieces: one call that encodes a large value keeps the interpreter, and with it the event loop, to its end.

Owns how a value is cut. Does not own where the pieces are made or written (`answers.py`).
Invariant: the pieces join to the JSON of the value; each took about a millisecond to make.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

SLICE_CHARS = 64 * 1024
SLICE_ITEMS = 4096
"""Length from which a text or a list of numbers is cut."""


class LaidOut:
    """A JSON value that is laid out when it is written, as pieces of its text."""

    def __init__(self, pieces: Callable[[], Iterator[bytes]]) -> None:
        self.pieces = pieces


class Items:
    """A JSON list whose items are made when they are written."""

    def __init__(self, items: Callable[[], Iterator[Any]]) -> None:
        self.items = items


def encoded(value: Any) -> bytes:
    """JSON of a small value, in one piece."""
    return msgspec.json.encode(value, enc_hook=_plain)


def json_pieces(value: Any) -> Iterator[bytes]:
    """JSON of a value of any size."""
    match value:
        case LaidOut():
            yield from value.pieces()
        case Items():
            yield from _list(value.items())
        case dict():
            separator = b"{"
            for key, item in value.items():
                yield separator + msgspec.json.encode(key) + b":"
                yield from json_pieces(item)
                separator = b","
            yield b"{}" if separator == b"{" else b"}"
        case str() if len(value) > SLICE_CHARS:
            yield b'"'
            for start in range(0, len(value), SLICE_CHARS):
                yield msgspec.json.encode(value[start : start + SLICE_CHARS])[1:-1]
            yield b'"'
        case list() if value and isinstance(value[0], int | float):
            separator = b"["
            for start in range(0, len(value), SLICE_ITEMS):
                yield separator + msgspec.json.encode(value[start : start + SLICE_ITEMS])[1:-1]
                separator = b","
            yield b"]"
        case list():
            yield from _list(iter(value))
        case _:
            yield msgspec.json.encode(value)


def _list(items: Iterator[Any]) -> Iterator[bytes]:
    separator = b"["
    for item in items:
        yield separator
        yield from json_pieces(item)
        separator = b","
    yield b"[]" if separator == b"[" else b"]"


def _plain(value: object) -> object:
    if isinstance(value, LaidOut):
        return msgspec.Raw(b"".join(value.pieces()))
    if isinstance(value, Items):
        return list(value.items())
    raise NotImplementedError(f"{type(value).__name__} is no JSON value")
