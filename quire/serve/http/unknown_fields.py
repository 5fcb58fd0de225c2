"""Bodies with fields that their type does not know: what is left of them, as JSON again.

The types stay strict, so that an ordinary body is decoded once; one that is refused for a field it has too many comes
here, and what its types know is written anew, byte for byte as it came. Owns which fields are taken out. Does not own
the types, nor which unknown fields are refused (`RefusedField`, in tables of the endpoints).
Invariants: a value is never changed; the work is linear in the body, once for each level of types.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from msgspec import inspect

from quire.core.errors import shown
from quire.core.spelling import NamedArguments, did_you_mean_or_known
from quire.serve.http.ignored import IgnoredParams
from quire.serve.http.refusal import bad_request, unsupported

MAX_NO_OP_BYTES = 1024
"""A longer value asks for something."""

_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
_LIST = msgspec.json.Decoder(list[msgspec.Raw])
_EMPTY: tuple[Any, ...] = (False, "", [], {})


@dataclasses.dataclass(frozen=True, slots=True)
class RefusedField:
    """A field that would change the answer and is not honoured."""

    why: str
    """And what to do instead."""
    no_ops: tuple[Any, ...] = ()
    """Values that ask for nothing, besides null and what is false or empty."""
    is_no_op: Callable[[Any], bool] | None = None
    """Another way to tell, for values that have parts."""
    keeps_false: bool = False
    """False asks for something."""

    def asks_nothing(self, value: bytes) -> bool:
        """Whether a JSON value may be ignored."""
        if len(value) > MAX_NO_OP_BYTES:
            return False
        found = msgspec.json.decode(value)
        if found is False and self.keeps_false:
            return False
        if any(found == one and type(found) in _alike(one) for one in (*_EMPTY, *self.no_ops)):
            return True
        return self.is_no_op is not None and self.is_no_op(found)


def _alike(value: Any) -> tuple[type, ...]:
    """0 is no false, but 1 is 1.0."""
    return (int, float) if type(value) in (int, float) else (type(value),)


Refused = Mapping[str, RefusedField]
"""Name of a field of the body itself, or `Type.field` of one inside → why it is refused."""


@dataclasses.dataclass(slots=True)
class _Shape:
    """What is known of a struct."""

    name: str
    tag_field: str | None
    is_closed: bool = False
    """A field that it has not asks for something in any case."""
    fields: dict[str, _Place | None] = dataclasses.field(default_factory=dict)
    """Known fields; those with a place may have structs inside."""


@dataclasses.dataclass(slots=True)
class _Place:
    """What may stand at a place: one of some structs, or a list."""

    shapes: dict[str | int | None, _Shape] = dataclasses.field(default_factory=dict)
    """By tag; a struct without one stands alone."""
    items: _Place | None = None


class UnknownFieldFilter:
    """Takes unknown fields out of JSON bodies of one type."""

    def __init__(self, kind: Any, refused: Refused) -> None:
        self._place = _place_of(inspect.type_info(kind), {})
        self._refused = refused
        self._refused_names = {name.rpartition(".")[2] for name in refused}

    def filtered(self, body: bytes | msgspec.Raw, within: str, ignored: IgnoredParams) -> bytes:
        """The body without them. Raises a Refusal for one that may not be ignored, and msgspec's errors for what is no
        JSON. within: path of the body."""
        data = bytes(body)
        return data if self._place is None else self._filter(data, self._place, within, is_top=True, ignored=ignored)

    def _filter(self, data: bytes, place: _Place, path: str, *, is_top: bool, ignored: IgnoredParams) -> bytes:
        head = data.lstrip()[:1]
        if head == b"{" and place.shapes:
            return self._filter_object(data, place.shapes, path, is_top=is_top, ignored=ignored)
        if head != b"[" or place.items is None:
            return data
        entries = [bytes(entry) for entry in _LIST.decode(data)]
        kept = [
            self._filter(entry, place.items, f"{path}[{index}]", is_top=False, ignored=ignored)
            for index, entry in enumerate(entries)
        ]
        if all(new is old for new, old in zip(kept, entries, strict=True)):
            return data
        return b"[" + b",".join(kept) + b"]"

    def _filter_object(
        self, data: bytes, shapes: dict[str | int | None, _Shape], path: str, *, is_top: bool, ignored: IgnoredParams
    ) -> bytes:
        members = _OBJECT.decode(data)
        shape = _shape_of(shapes, members)
        if shape is None:
            return data
        prefix = f"{path}." if path else ""
        kept: list[bytes] = []
        is_whole = True
        for key, raw in members.items():
            if key not in shape.fields:
                if key in self._refused_names:
                    self._refuse(shape.name, key, raw, prefix, is_top=is_top, ignored=ignored)
                elif shape.is_closed and not RefusedField("").asks_nothing(bytes(raw)):
                    hint = did_you_mean_or_known(key, shape.fields)
                    raise bad_request(f"{prefix}{shown(key)[1:-1]} is not known{hint}", path, "unknown_parameter")
                else:
                    ignored.note_member(prefix, key, shape.fields)
                is_whole = False
                continue
            place, value = shape.fields[key], bytes(raw)
            new = value if place is None else self._filter(value, place, prefix + key, is_top=False, ignored=ignored)
            is_whole &= new is value
            kept.append(msgspec.json.encode(key) + b":" + new)
        return data if is_whole else b"{" + b",".join(kept) + b"}"

    def _refuse(
        self, owner: str, key: str, raw: msgspec.Raw, prefix: str, *, is_top: bool, ignored: IgnoredParams
    ) -> None:
        """Look at a field that may be refused here: it is, or it asks for nothing."""
        value = bytes(raw)
        found = self._refused.get(f"{owner}.{key}") or (self._refused.get(key) if is_top else None)
        if found is None:
            ignored.note_member(prefix, key)
        elif value.strip() != b"null":
            if not found.asks_nothing(value):
                raise unsupported(prefix + key, found.why)
            ignored.note_member(prefix, key)


def _shape_of(shapes: dict[str | int | None, _Shape], members: dict[str, msgspec.Raw]) -> _Shape | None:
    """The struct that an object is; None if its tag is none of theirs."""
    first = next(iter(shapes.values()))
    if first.tag_field is None or len(shapes) == 1:
        return first
    tag = members.get(first.tag_field)
    written = b"" if tag is None else bytes(tag)
    return shapes.get(msgspec.json.decode(written)) if written[:1] == b'"' else None


def _place_of(kind: inspect.Type, known: dict[type, _Shape]) -> _Place | None:
    """known: structs that were met, as one may hold itself."""
    place = _Place()
    for one in kind.types if isinstance(kind, inspect.UnionType) else (kind,):
        if isinstance(one, inspect.StructType):
            place.shapes[one.tag] = _struct(one, known)
        elif isinstance(one, inspect.ListType):
            place.items = _place_of(one.item_type, known)
    return place if place.shapes or place.items is not None else None


def _struct(kind: inspect.StructType, known: dict[type, _Shape]) -> _Shape:
    shape = known.get(kind.cls)
    if shape is None:
        shape = known[kind.cls] = _Shape(kind.cls.__name__, kind.tag_field, isinstance(kind.cls, NamedArguments))
        if kind.tag_field is not None:
            shape.fields[kind.tag_field] = None
        for field in kind.fields:
            shape.fields[field.encode_name] = _place_of(field.type, known)
    return shape
