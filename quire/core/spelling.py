"""Names that were mistyped: the nearest one that there is, for command lines, options and arguments of Python."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import msgspec

MAX_DISTANCE: Final = 2
"""Edits by which a word may differ from the one that is suggested for it."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean X?` for the nearest of `known`, or an empty string when none is near."""
    found = nearest(word, known)
    return f"; did you mean {found}?" if found else ""


def did_you_mean_or_known(word: str, known: Iterable[str]) -> str:
    """The same, or `; known are X, Y` when none is near."""
    names = sorted(known)
    return did_you_mean(word, names) or f"; known are {', '.join(names)}"


def did_you_mean_and_known(word: str, known: Iterable[str], listed: Iterable[str] = ()) -> str:
    """`; did you mean X? There are X, Y`, or `: there are X, Y` when none is near. listed: what is told of `known`."""
    names = list(known)
    near = did_you_mean(word, names)
    return f"{near}{' There' if near else ': there'} are {', '.join(listed or names)}"


def nearest(word: str, known: Iterable[str]) -> str:
    """The one of `known` that is nearest to `word`, else one that begins with it or has its words, whole or shortened;
    empty when none is near. The only one that ends with `word` is nearer than others by more than one letter."""
    found = sorted((_distance(word, each), each) for each in known)
    near = [each for distance, each in found if distance <= _limit(word)]
    ended = [each for _, each in found if _ends_with(each, word)]
    if len(ended) == 1 and not (found[0][0] <= 1 and near):
        return ended[0]
    begun = [each for _, each in found if len(word.lstrip("-")) > 3 and each.startswith(word)]
    return next(iter(near or begun or [each for _, each in found if _has_words(word, each)]), "")


def _limit(word: str) -> int:
    return min(MAX_DISTANCE, len(word) // 3)


def _ends_with(long: str, word: str) -> bool:
    """`--request-rate` with `--rate`, `max_num_seqs` with `num_seqs`."""
    end = word.lstrip("-").replace("_", "-")
    return len(end) > 3 and long.replace("_", "-").endswith(f"-{end}") and long.lstrip("-") != end


def _has_words(one: str, other: str) -> bool:
    """`--max-num-sequences` and `--max-num-seqs`: word by word the same, nearly, or one a shortened form of the other,
    and at least one word the same."""
    words, others = (text.replace("_", "-").lstrip("-").split("-") for text in (one, other))
    if len(words) != len(others) or len(words) < 2:
        return False
    pairs = list(zip(words, others, strict=True))
    return any(a == b for a, b in pairs) and all(
        _distance(a, b) <= _limit(a) or _shortens(a, b) or _shortens(b, a) for a, b in pairs
    )


def _shortens(short: str, word: str) -> bool:
    """`seqs`, `sequences`: the same first letter, and the others in their order."""
    letters = iter(word)
    return len(short) > 2 and short[:1] == word[:1] and all(letter in letters for letter in short)


def _distance(one: str, other: str) -> int:
    """Letters to insert, remove, change or swap with the next one to make one of the other; more than `MAX_DISTANCE`
    may come out too large."""
    if abs(len(one) - len(other)) > MAX_DISTANCE:
        return MAX_DISTANCE + 1
    rows = [list(range(len(other) + 1))]
    for i, letter in enumerate(one, start=1):
        row = [i]
        for j, wanted in enumerate(other, start=1):
            cost = min(rows[-1][j] + 1, row[-1] + 1, rows[-1][j - 1] + (letter != wanted))
            if i > 1 and j > 1 and letter == other[j - 2] and one[i - 2] == wanted:
                cost = min(cost, rows[-2][j - 2] + 1)
            row.append(cost)
        rows.append(row)
    return rows[-1][-1]


class NamedArguments(msgspec.StructMeta):
    """Structs whose TypeError for an argument that they do not have names the nearest one, or what to use instead."""

    elsewhere: Mapping[str, str] = MappingProxyType({})
    """Arguments of vLLM's type of the same name that a struct has not → what to do instead."""

    if not TYPE_CHECKING:  # a checker is to see the fields of each struct

        def __call__(cls, *args: Any, **values: Any) -> Any:
            try:
                return _MAKE(cls, *args, **values)
            except TypeError:
                for name in values.keys() - set(cls.__struct_fields__):
                    raise TypeError(_unknown(cls.__name__, name, cls.__struct_fields__, cls.elsewhere)) from None
                raise


_MAKE: Final = msgspec.StructMeta.__call__


def _unknown(struct: str, name: str, fields: Iterable[str], elsewhere: Mapping[str, str]) -> str:
    if name in elsewhere:
        return f"{struct}({name}=...) is known in vLLM, not in Quire: {elsewhere[name]}"
    return f"{struct} has no argument {name!r}{did_you_mean_or_known(name, fields)}"
