"""A look at a large JSON body before it is decoded: how much work it would be, and where its token ids are.

One call of the decoder keeps the interpreter, and with it the event loop, to its end: milliseconds for a text of
megabytes, but seconds for as many bytes of `[],[],`. So values are counted first, window by window, and lists of token
ids, which alone may be long, are decoded window by window. Does not own decoding (`decoding.py`).
Invariants: linear in the body; no step looks at more than a window; a body that is not JSON is judged as well.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

WINDOW_BYTES = 64 * 1024
_CLOSED = re.compile(rb'[^"]*+(?:"[^"\\]*+(?:\\.[^"\\]*+)*+"[^"]*+)*+', re.DOTALL)
"""As far as strings are closed."""
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_REST = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
"""What is inside a string, up to its end."""
_MARK = re.compile(rb'["\[\]{}]')
_SPACE = re.compile(rb"[ \t\r\n]*+")


@dataclasses.dataclass(slots=True)
class BodyCounts:
    """What a body has, at least about: what is not JSON is counted somehow."""

    n_escapes: int = 0
    """Backslashes."""
    n_numbers: int = 0
    n_others: int = 0
    """Strings (keys too), lists, objects, true, false and null."""


@dataclasses.dataclass(slots=True)
class IdList:
    """The value of a field that is a list of numbers, or of lists of numbers."""

    start: int
    stop: int
    """Behind its last bracket."""
    inner: list[tuple[int, int]]
    """Spans of the lists in it, brackets included."""


def count_body(body: bytes, most_others: int) -> BodyCounts:
    """Count what is in a body; counting ends where there are more than `most_others` of what is no number."""
    found, at, n_places = BodyCounts(), 0, 1
    while at < len(body) and found.n_others <= most_others:
        end = min(at + WINDOW_BYTES, len(body))
        closed = _end(_CLOSED, body, at, end)
        outside, n_strings = _STRING.subn(b"", body[at:closed])
        if closed < end:
            n_strings += 1
            closed = skip_string(body, closed)
        found.n_escapes += sum(body.count(b"\\", *window) for window in windows(at, closed))
        n_literals = outside.count(b"t") + outside.count(b"f") + outside.count(b"n")
        n_places += outside.count(b":") + outside.count(b",")
        n_lists = outside.count(b"[") + outside.count(b"{")
        n_places += n_lists
        found.n_others += n_strings + n_literals + n_lists
        at = closed
    # The body is a value, and behind each bracket, comma or colon is another value or a key. What is none of the others
    # there is a number, or the end of a list without values.
    found.n_numbers = max(0, n_places - found.n_others)
    return found


def skip_string(body: bytes, start: int) -> int:
    """Where the string that begins at `start` is over; the end of the body if it is not closed."""
    at = start + 1
    while at < len(body):
        end = min(at + WINDOW_BYTES, len(body))
        at = _end(_REST, body, at, end)
        if at < end and body[at : at + 1] == b'"':
            return at + 1
        if end == len(body):
            return end
        # The window ends inside the string, perhaps behind a backslash: the next one begins there.
    return len(body)


def largest_member(body: bytes, most_marks: int) -> bytes:
    """The key, as it is written, of the longest member of the outermost object; empty if there is none. Only the part
    that has the first `most_marks` strings and brackets is looked at."""
    depth, at, found, key, begin = 0, 0, (0, b""), b"", 0
    for _ in range(most_marks):
        mark = _next_mark(body, at)
        if mark == len(body):
            break
        kind, at = body[mark : mark + 1], mark + 1
        if kind == b'"':
            at = skip_string(body, mark)
            after = _end(_SPACE, body, at, min(at + WINDOW_BYTES, len(body)))
            if depth == 1 and body[after : after + 1] == b":":
                found = max(found, (mark - begin, key))
                key, begin = body[mark + 1 : at - 1], mark
        else:
            depth += 1 if kind in b"[{" else -1
    return max(found, (at - begin, key))[1]


def find_ids(body: bytes, field: bytes) -> IdList | None:
    """The list of a field of the outermost object; None if there is no such list, or more in it than numbers."""
    quoted, depth, found, at = b'"' + field + b'"', 0, None, 0
    while (mark := _next_mark(body, at)) < len(body):
        kind = body[mark : mark + 1]
        at = mark + 1
        if kind == b'"':
            at = skip_string(body, mark)
            if depth == 1 and at - mark == len(quoted) and body[mark:at] == quoted:
                begin = _value_of(body, at)
                if begin < 0:
                    continue
                if found is not None:
                    return None
                found = _list_at(body, begin)
                if found is None:
                    return None
                at = found.stop
        else:
            depth += 1 if kind in b"[{" else -1
    return found


def windows(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """A span in windows."""
    return ((at, min(at + WINDOW_BYTES, stop)) for at in range(start, stop, WINDOW_BYTES))


def cuts(body: bytes, start: int, stop: int) -> list[tuple[int, int]]:
    """Pieces of a list of numbers without its brackets, cut at commas, which are left out."""
    pieces = []
    while stop - start > WINDOW_BYTES:
        comma = body.rfind(b",", start, start + WINDOW_BYTES)
        if comma < 0:
            break  # no number is that long: the decoder will say what is wrong
        pieces.append((start, comma))
        start = comma + 1
    return [*pieces, (start, stop)]


def _end(pattern: re.Pattern[bytes], body: bytes, start: int, end: int) -> int:
    match = pattern.match(body, start, end)
    return start if match is None else match.end()


def _next_mark(body: bytes, at: int) -> int:
    """Where the next quote or bracket is, from `at` on; the body's length if there is none."""
    while at < len(body):
        end = min(at + WINDOW_BYTES, len(body))
        match = _MARK.search(body, at, end)
        if match is not None:
            return match.start()
        at = end
    return len(body)


def _value_of(body: bytes, at: int) -> int:
    """Where the value begins whose key ends at `at`, if it is a list; else -1."""
    at = _end(_SPACE, body, at, min(at + WINDOW_BYTES, len(body)))
    if body[at : at + 1] != b":":
        return -1
    at = _end(_SPACE, body, at + 1, min(at + WINDOW_BYTES, len(body)))
    return at if body[at : at + 1] == b"[" else -1


def _list_at(body: bytes, start: int) -> IdList | None:
    """The list that begins at `start`, if it has only numbers and lists of numbers."""
    inner: list[tuple[int, int]] = []
    begin, at = -1, start + 1
    while (mark := _next_mark(body, at)) < len(body):
        kind, at = body[mark : mark + 1], mark + 1
        if kind == b"[" and begin < 0:
            begin = mark
        elif kind == b"]" and begin >= 0:
            inner.append((begin, at))
            begin = -1
        elif kind == b"]":
            return IdList(start, at, inner)
        else:
            return None
    return None
