"""What the options of vLLM and the flags of llama.cpp mean here: renamed, taken as they are, or refused by name.

Owns the judgement of one option with its value. Does not own the lists (`config/vllm_flags.py`) nor the command line
(`config/command_line.py`). Nothing here knows which options Quire has: ask it only about those that are not ours.
"""

from __future__ import annotations

import contextlib
import enum
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Final, NamedTuple

from quire.config.vllm_flags import LLAMA_CPP, NO_EFFECT, REFUSED, RENAMED, SAME, SHORT, SHORT_OF_PARTS
from quire.core.errors import shown
from quire.core.spelling import did_you_mean, nearest

_OFF: Final = ("", "false", "none", "null", "[]", "{}", "()", "set()")
"""Values by which an option says that it is not used."""


@enum.unique
class State(enum.Enum):
    """What becomes of an option of vLLM's."""

    RENAMED = "renamed"
    SAME = "taken, if it says what Quire does anyway"
    NO_EFFECT = "taken without effect"
    REFUSED = "refused"


@enum.unique
class OptionShape(enum.Enum):
    """How an option is written on the command line."""

    VALUE = ""
    SWITCH = "!"
    LIST = "*"
    OBJECT = "{"


class Foreign(NamedTuple):
    """One option that another engine has."""

    name: str
    """vLLM's, with underscores."""
    state: State
    shape: OptionShape = OptionShape.VALUE
    values: tuple[str, ...] = ()
    """Those that are taken, of SAME."""
    because: str = ""
    """What Quire does, or our name of it (RENAMED)."""
    instead: str = ""

    def objection(self, value: object) -> str:
        """Why this value cannot be honoured, and what to do; empty when it is taken, as an object is of which every
        part is."""
        return next((why for part in _parts(value) if (why := self._objection(part))), "")

    def takes_parts(self) -> bool:
        """Whether its value can be a JSON object, and so be given by parts: --speculative-config.method ngram."""
        is_single = self.shape is OptionShape.VALUE and self.state in (State.REFUSED, State.NO_EFFECT)
        return is_single or self.shape is OptionShape.OBJECT

    def _objection(self, value: object) -> str:
        text = str(value).strip().lower()
        if self.state in (State.RENAMED, State.NO_EFFECT) or (text in _OFF and text not in self._on_values()):
            return ""
        if self.state is State.SAME and _is_among(text, self.values):
            return ""
        if self.state is State.REFUSED:
            return f"{self.name} is known in vLLM, not in Quire: {self.instead}"
        told = "" if text in ("true", "false") else f" = {shown(value)}"
        taken = "" if self.shape is OptionShape.SWITCH else f" (it takes {' or '.join(self.values)})"
        return f"{self.name}{told} is known in vLLM, not in Quire, where {self.because}{taken}: {self.instead}"

    def _on_values(self) -> tuple[str, ...]:
        """`false` switches something off that Quire always does."""
        return ("false",) if self.state is State.SAME and self.values == ("true",) else ()


def _parts(value: object) -> Iterator[object]:
    """What an object, or the text of one in JSON, holds at its ends; any other value itself."""
    if isinstance(value, str) and value.strip().startswith("{"):
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(value)
    if not isinstance(value, Mapping):
        yield value
        return
    for inner in value.values():
        yield from _parts(inner)


def _is_among(text: str, values: tuple[str, ...]) -> bool:
    if text in values:
        return True
    try:
        number = float(text)
    except ValueError:
        return False
    return any(value.replace(".", "").isdigit() and float(value) == number for value in values)


def _names(names: str) -> list[tuple[str, OptionShape]]:
    return [(name.rstrip("!*{"), OptionShape(name[len(name.rstrip("!*{")) :])) for name in names.split()]


def _all() -> dict[str, Foreign]:
    found = [Foreign(name, State.RENAMED, because=ours) for name, ours in RENAMED.items()]
    for row in SAME:
        values = tuple(row.values.split())
        for name, shape in _names(row.names):
            found.append(Foreign(name, State.SAME, shape, values, row.because, row.instead))
    for group, state in [(each, State.NO_EFFECT) for each in NO_EFFECT] + [(each, State.REFUSED) for each in REFUSED]:
        for name, shape in _names(group.names):
            found.append(Foreign(name, state, shape, because=group.answer, instead=group.answer))
    return {each.name: each for each in found}


FOREIGN: Final = _all()
"""vLLM's name → what becomes of it."""
SHORT_FLAGS: Final = SHORT
SHORT_FLAGS_OF_PARTS: Final = SHORT_OF_PARTS
LLAMA_HINTS: Final = {flag: hint for flags, hint in LLAMA_CPP.items() for flag in flags.split()}
"""A flag of llama.cpp → what to use here."""


def suggestion(word: str, ours: Collection[str], spell: Callable[[str], str] = str) -> str:
    """`; did you mean X?` for a name of ours near `word`, else for one of vLLM's, which `spell` writes; or nothing."""
    own = did_you_mean(word, ours)
    theirs = "" if own else nearest(word, map(spell, FOREIGN))
    if theirs.startswith(f"{word}-"):  # another option, which begins with the same words
        theirs = ""
    return f"; did you mean vLLM's {theirs}?" if theirs else own
