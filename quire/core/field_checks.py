"""The checks of a struct's fields, made from their types: bounds stand in `msgspec.Meta` and nowhere else.

Owns what a value may be given as (a tuple for a list, a number of numpy, one string for a list of strings), and the
words of a refusal. Does not own the bounds (`core/sampling.py`) nor checks that look at several fields.
Invariant: what a check lets through can be encoded and decoded again as its field.
"""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Callable
from typing import Any, Final

import msgspec
from msgspec import inspect

from quire.core.errors import InvalidParameter

MAX_ID_DIGITS: Final = 9

Check = Callable[[Any], Any]
"""A value as its field keeps it. Raises InvalidParameter."""


class FieldChecks:
    """Those of one struct. `run` costs what the fields that are not at their defaults cost."""

    def __init__(self, struct: type[msgspec.Struct]) -> None:
        info = inspect.type_info(struct)
        assert isinstance(info, inspect.StructType)
        self.types: dict[str, inspect.Type] = {field.name: field.type for field in info.fields}
        self._checks = {field.name: _check(field.name, field.type) for field in info.fields}
        self._values_of = operator.attrgetter(*self._checks)
        self._rows = [(field.name, field.default, self._checks[field.name]) for field in info.fields]

    def run(self, value: msgspec.Struct) -> None:
        """Check all fields and put each into its plain form. Raises InvalidParameter for the first that is bad."""
        for given, (name, default, check) in zip(self._values_of(value), self._rows):  # noqa: B905 (it costs a third)
            if given is not default:
                plain = check(given)
                if plain is not given:
                    setattr(value, name, plain)

    def one(self, name: str, value: object, called: str = "") -> Any:
        """One field's value in its plain form. called: its name in the refusal, where it came under another one."""
        return (_check(called, self.types[name]) if called else self._checks[name])(value)


def bare(kind: inspect.Type) -> tuple[inspect.Type, bool]:
    """A type without its description and None; whether None was in it."""
    kind = kind.type if isinstance(kind, inspect.Metadata) else kind
    if not isinstance(kind, inspect.UnionType):
        return kind, False
    inner = [one for one in kind.types if not isinstance(one, inspect.NoneType)]
    return (bare(inner[0])[0], True) if len(inner) == 1 else (kind, False)


def _check(name: str, kind: inspect.Type) -> Check:
    """Every check takes what is plain and good before it looks closer."""
    inner, may_be_none = bare(kind)
    match inner:
        case inspect.IntType():
            return _int(name, inner, may_be_none)
        case inspect.FloatType():
            return _float(name, inner)
        case inspect.BoolType():
            return _instance(name, bool, "True or False", may_be_none)
        case inspect.UnionType():
            return _bool_or_word(name, inner)
        case inspect.EnumType():
            return _instance(name, inner.cls, f"an {inner.cls.__name__}", may_be_none)
        case inspect.StructType():
            return _instance(name, inner.cls, f"a {inner.cls.__name__}", may_be_none)
        case inspect.DictType():
            return _biases(name, inner)
        case inspect.ListType() if isinstance(bare(inner.item_type)[0], inspect.StrType):
            return _strings(name, inner)
        case inspect.ListType():
            return _ids(name, inner, may_be_none)
    raise TypeError(f"{name}: there is no check of {kind}")


def _int(name: str, kind: inspect.IntType, may_be_none: bool) -> Check:
    assert kind.ge is not None
    low, high = kind.ge, math.inf if kind.le is None else kind.le
    if kind.le is None:
        limit = f"an integer of at least {low}"
    elif (low, high) == (-(2**63), 2**63 - 1):
        limit = "a 64-bit signed integer"
    else:
        limit = f"an integer between {low} and {high}"

    def check(value: Any) -> Any:
        if value.__class__ is int and low <= value <= high:
            return value
        value = plain_number(value)
        if (value is None and may_be_none) or (is_int(value) and low <= value <= high):
            return value
        raise InvalidParameter(name, value, limit)

    return check


def _float(name: str, kind: inspect.FloatType, limit: str = "") -> Check:
    is_open = kind.gt is not None
    low, high = kind.gt if is_open else kind.ge, kind.le
    assert low is not None and high is not None
    limit = limit or f"a number in {'(' if is_open else '['}{low:g}, {high:g}]"
    least = math.nextafter(low, high) if is_open else low

    def check(value: Any) -> Any:
        if value.__class__ is float and least <= value <= high:  # nan is in no range
            return value
        value = plain_number(value)
        if is_number(value) and least <= value <= high:
            return value
        raise InvalidParameter(name, value, limit)

    return check


def _instance(name: str, kind: type, limit: str, may_be_none: bool) -> Check:
    def check(value: Any) -> Any:
        if isinstance(value, kind) or (value is None and may_be_none):
            return value
        raise InvalidParameter(name, value, limit)

    return check


def _bool_or_word(name: str, kind: inspect.UnionType) -> Check:
    words = [word for one in kind.types if isinstance(one, inspect.LiteralType) for word in one.values]
    limit = f"True, False or {' or '.join(map(repr, words))}"

    def check(value: Any) -> Any:
        if isinstance(value, bool) or (isinstance(value, str) and value in words):
            return value
        raise InvalidParameter(name, value, limit)

    return check


def _strings(name: str, kind: inspect.ListType) -> Check:
    item, most = bare(kind.item_type)[0], kind.max_length
    assert isinstance(item, inspect.StrType) and item.max_length is not None and most is not None
    longest = item.max_length

    def check(value: Any) -> Any:
        if value.__class__ is list and not value:
            return value
        value = [value] if isinstance(value, str) else _listed(value)
        if not isinstance(value, list):
            raise InvalidParameter(name, value, "a string or a list of strings")
        if len(value) > most:
            raise InvalidParameter(name, f"{len(value)} strings", f"at most {most} strings")
        for text in value:
            if not isinstance(text, str) or not 0 < len(text) <= longest:
                raise InvalidParameter(name, text, f"non-empty strings of at most {longest} characters")
            try:
                text.encode()
            except UnicodeEncodeError:
                raise InvalidParameter(name, text, "valid Unicode text (it has unpaired surrogates)") from None
        return value

    return check


def _ids(name: str, kind: inspect.ListType, may_be_none: bool) -> Check:
    most, least = kind.max_length, kind.min_length or 0
    assert most is not None

    def check(value: Any) -> Any:
        if value.__class__ is list and not value and not least:
            return value
        if value is None and may_be_none:
            return None
        value = _listed(value)
        if not isinstance(value, list):
            raise InvalidParameter(name, value, "a list of token ids")
        if len(value) < least:
            raise InvalidParameter(name, value, "a list with at least one token id")
        _check_count(name, len(value), most)
        _check_ids(name, value)
        return value

    return check


def _biases(name: str, kind: inspect.DictType) -> Check:
    """None stands for no bias."""
    most, item = kind.max_length, bare(kind.value_type)[0]
    assert isinstance(item, inspect.FloatType) and most is not None
    bias_of = _float(name, item, f"a finite number in [{item.ge:g}, {item.le:g}] for each token id")

    def check(value: Any) -> Any:
        if value is None:
            return None
        if not isinstance(value, dict):
            raise InvalidParameter(name, value, "a dict of token ids and numbers")
        _check_count(name, len(value), most)
        plain = {_token_id(key): bias_of(bias) for key, bias in value.items()}
        _check_ids(name, list(plain))
        return plain

    return check


def _check_count(name: str, n_ids: int, most: int) -> None:
    if n_ids > most:
        raise InvalidParameter(name, f"{n_ids} ids", f"at most {most} token ids")


def _check_ids(name: str, ids: list[Any]) -> None:
    if set(map(type, ids)) <= {int} and min(ids, default=0) >= 0:
        return
    for token_id in ids:
        if not is_int(token_id) or token_id < 0:
            raise InvalidParameter(name, token_id, "token ids, which are integers of at least 0")


def _listed(value: Any) -> Any:
    """None as an empty list, a tuple as a list, anything else as it is."""
    if value is None:
        return []
    return list(value) if isinstance(value, tuple) else value


def plain_number(value: Any) -> Any:
    """Numbers of numpy and the like as Python's own; anything else as it is."""
    if type(value) in (int, float, bool, type(None)) or isinstance(value, bool):
        return value
    if isinstance(value, numbers.Integral):
        return operator.index(value)
    return float(value) if isinstance(value, float) else value


def _token_id(key: Any) -> Any:
    """A key of a dict, which may be text as in JSON."""
    if isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) <= MAX_ID_DIGITS:
        return int(key)
    return plain_number(key)


def is_int(value: object) -> bool:
    """Whether it is an integer and no boolean."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Whether it is an integer or float and no boolean."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)
