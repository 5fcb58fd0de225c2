"""`Pattern`: a regular expression that somebody else wrote, matched in time linear in the text, whatever it is.

Owns a subset of Python's syntax: characters, `.`, classes, escapes of them, groups, `|`, `* + ? {m,n}`, `^`, `$`, and
lookaheads at its beginning. The rest (references, flags, lookbehinds) is refused. All ways through it are followed at
once (Thompson 1968, "Regular Expression Search Algorithm"), so that there is nothing to go back to.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Final

Test = Callable[[str], bool]
"""Of one character."""
MAX_CHARS: Final = 1024
MAX_STATES: Final = 1024
"""Of one pattern; repetitions with numbers count as often as they say."""
MAX_DEPTH: Final = 32
"""Of groups."""
MAX_SETS: Final = 4096
"""Sets of states that are remembered."""
MATCHED: Final = -1
REPEATS: Final = ("*", "+", "?")
_COUNTS: Final = re.compile(r"\{(\d{0,4})(,?)(\d{0,4})\}")
_CLASSES: Final[dict[str, Test]] = {
    "d": str.isdecimal, "s": str.isspace, "w": lambda one: one.isalnum() or one == "_",
    "D": lambda one: not one.isdecimal(), "S": lambda one: not one.isspace(),
    "W": lambda one: not (one.isalnum() or one == "_"),
}  # fmt: skip


class PatternError(ValueError):
    """What is not read of a pattern."""


class _State:
    """A place in a pattern: where a character that passes `test` leads; without a test, all places that are here too.

    edge: "^" or "$": only at the beginning, or the end, of the text.
    """

    __slots__ = ("edge", "targets", "test")

    def __init__(self, test: Test | None, targets: Iterable[int], edge: str = "") -> None:
        self.test, self.targets, self.edge = test, [*targets], edge


Node = Callable[["Pattern", int], int]
"""A part of a pattern: (pattern, the state behind it) → the state before it, which it adds."""


class Pattern:
    """See the module."""

    def __init__(self, text: str) -> None:
        """Raises PatternError with what is not read."""
        if len(text) > MAX_CHARS:
            raise PatternError(f"it has {len(text):,} characters, at most {MAX_CHARS:,} are read")
        self.states: list[_State] = []
        reader = _Reader(text)
        self._ahead = [(wanted, self._start(node)) for wanted, node in reader.lookaheads()]
        self._first = self._start(reader.whole())
        self._next: dict[tuple[frozenset[int], str], frozenset[int]] = {}

    def add(self, test: Test | None, targets: Iterable[int], edge: str = "") -> int:
        """A state; its number."""
        if len(self.states) >= MAX_STATES:
            raise PatternError(f"it has more than {MAX_STATES:,} places: write the names out")
        self.states.append(_State(test, targets, edge))
        return len(self.states) - 1

    def matches(self, text: str) -> bool:
        """Whether a beginning of the text is one of its words, as `re.match` finds it."""
        return all(self._runs(first, text) == wanted for wanted, first in self._ahead) and self._runs(self._first, text)

    def _start(self, node: Node) -> frozenset[int]:
        return self._closed([node(self, MATCHED)], "^")

    def _runs(self, here: frozenset[int], text: str) -> bool:
        for one in text:
            if MATCHED in here or not here:
                break
            step = here, one
            if step not in self._next:
                if len(self._next) >= MAX_SETS:
                    self._next.clear()
                self._next[step] = self._closed(self._reached(here, one), "")
            here = self._next[step]
        else:
            here = self._closed(here, "$")
        return MATCHED in here

    def _reached(self, here: Iterable[int], one: str) -> Iterable[int]:
        for number in here:
            state = self.states[number]
            if state.test is not None and state.test(one):
                yield from state.targets

    def _closed(self, numbers: Iterable[int], edge: str) -> frozenset[int]:
        """These states, and all that are in the same place. Those that need an edge stay, for the end of the text."""
        found, todo = set[int](), [*numbers]
        while todo:
            number = todo.pop()
            if number in found:
                continue
            found.add(number)
            if number != MATCHED and self.states[number].test is None and self.states[number].edge in ("", edge):
                todo += self.states[number].targets
        return frozenset(found)


class _Reader:
    """The syntax."""

    def __init__(self, text: str) -> None:
        self._text, self._at, self._depth = text, 0, 0

    def lookaheads(self) -> Iterable[tuple[bool, Node]]:
        """Those at the beginning, perhaps behind `^`: (whether it must match, what)."""
        if self._text.startswith(("^(?=", "^(?!")):
            self._at = 1
        while self._text.startswith(("(?=", "(?!"), self._at):
            wanted = self._text[self._at + 2] == "="
            self._at += 3
            yield wanted, self._group()

    def whole(self) -> Node:
        """All that is left."""
        node = self._either()
        if self._at < len(self._text):
            raise PatternError("a ) too many")
        return node

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _take(self) -> str:
        one = self._peek()
        self._at += 1
        if not one:
            raise PatternError("it ends too early")
        return one

    def _group(self) -> Node:
        """Up to its closing parenthesis."""
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise PatternError(f"its groups are more than {MAX_DEPTH} deep")
        node = self._either()
        if self._take() != ")":
            raise PatternError("a ( too many")
        self._depth -= 1
        return node

    def _either(self) -> Node:
        ways = [self._sequence()]
        while self._peek() == "|":
            self._at += 1
            ways.append(self._sequence())
        return ways[0] if len(ways) == 1 else lambda made, then: made.add(None, [way(made, then) for way in ways])

    def _sequence(self) -> Node:
        parts: list[Node] = []
        while self._peek() not in ("", "|", ")"):
            parts.append(self._repeated(self._one()))

        def add(made: Pattern, then: int) -> int:
            for part in reversed(parts):
                then = part(made, then)
            return then

        return add

    def _one(self) -> Node:
        one = self._take()
        if one == "(":
            if self._text.startswith("?:", self._at):
                self._at += 2
            elif self._peek() == "?":
                kind = self._text[self._at - 1 : self._at + 2]
                raise PatternError(f"{kind} is not read: lookaheads are, at its beginning")
            return self._group()
        if one in "^$":
            return lambda made, then: made.add(None, [then], one)
        if one in REPEATS:
            raise PatternError(f"nothing stands before {one}")
        test = self._set() if one == "[" else "\n".__ne__ if one == "." else self._plain(one)
        return lambda made, then: made.add(test, [then])

    def _plain(self, one: str) -> Test:
        """A character, or what a backslash makes of the next."""
        if one != "\\":
            return one.__eq__
        escaped = self._take()
        if escaped in _CLASSES:
            return _CLASSES[escaped]
        if escaped.isalnum():
            raise PatternError(f"\\{escaped} is not read")
        return escaped.__eq__

    def _set(self) -> Test:
        """Behind [."""
        is_negated = self._peek() == "^"
        self._at += is_negated
        tests, first = list[Test](), True
        while first or self._peek() != "]":
            one, first = self._take(), False
            if one != "\\" and self._peek() == "-" and self._text[self._at + 1 : self._at + 2] not in ("", "]", "\\"):
                self._at += 1
                tests.append(_between(one, self._take()))
            else:
                tests.append(self._plain(one))
        self._at += 1
        return lambda char: any(test(char) for test in tests) != is_negated

    def _repeated(self, node: Node) -> Node:
        counts = _COUNTS.match(self._text, self._at)
        if counts is not None and counts[0] not in ("{}", "{,}"):
            self._at = counts.end()
            low, high = int(counts[1] or 0), int(counts[3]) if counts[3] else None
            high = high if counts[2] else low
        elif self._peek() in REPEATS:
            low, high = {"*": (0, None), "+": (1, None), "?": (0, 1)}[self._take()]
        else:
            return node
        if high is not None and high < low:
            raise PatternError(f"{{{low},{high}}} is no range")
        self._at += self._peek() == "?"  # the shortest first: as good, where only whether it matches counts
        if self._peek() in REPEATS:
            raise PatternError("a repetition of a repetition is not read")
        return lambda made, then: _repeat(made, node, low, high, then)


def _between(low: str, high: str) -> Test:
    return lambda char: low <= char <= high


def _repeat(made: Pattern, node: Node, low: int, high: int | None, then: int) -> int:
    if high is None:
        loop = made.add(None, [then])
        made.states[loop].targets.append(node(made, loop))
        then = loop
    else:
        end = then
        for _ in range(high - low):
            then = made.add(None, [end, node(made, then)])
    for _ in range(low):
        then = node(made, then)
    return then
