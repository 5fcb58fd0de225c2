"""Finding the lines of an input without holding it: where each begins, and whether its custom_id came before.

Synchronous, for a thread of its own. Owns what a line is; does not own what makes it good (`lines.py`).
Invariants: memory is bounded by the longest line that is allowed, and by `MAX_LINES` marks of ids; a content that is
not all there is ContentLost, never a shorter input.
"""

from __future__ import annotations

import os
import pathlib
from typing import IO

from quire.serve.batch.lines import custom_id_of, mark_of
from quire.serve.batch.outputs import ContentLost
from quire.serve.batch.queue import ScannedLine, doubled

MAX_LINES = 100_000
READ_BYTES = 1 << 20
SOME_BYTES = 8 << 20
SOME_LINES = 2000


class InputScan:
    """One pass over an input, some lines at a time."""

    def __init__(self, path: pathlib.Path, n_bytes: int, max_line_bytes: int) -> None:
        """n_bytes: of the whole content; max_line_bytes: longer lines are found but not looked into."""
        self._content = opened(path, n_bytes)
        self._n_bytes = n_bytes
        self._max_line_bytes = max_line_bytes
        self._held = b""
        """What was read and belongs to no line yet."""
        self._at = 0
        """Offset of the line that is being read."""
        self._n_passed = 0
        """Bytes of that line which were too many to hold."""
        self._is_blank = True
        """True if those are all white."""
        self._marks: dict[bytes, int] = {}
        """Mark of an id → number of the line that has it first."""
        self._number = 0
        """Of the line that is being read, from 0, blank ones counted."""
        self.n_lines = 0
        """That are not blank."""
        self.is_done = False

    def close(self) -> None:
        """Let go of the content."""
        self._content.close()

    def some(self) -> list[ScannedLine]:
        """The next lines that are not blank, perhaps none. Raises ContentLost or OSError."""
        found: list[ScannedLine] = []
        n_read = 0
        while not self.is_done and len(found) < SOME_LINES and n_read < SOME_BYTES:
            data = self._content.read(READ_BYTES)
            n_read += len(data)
            if not data:
                self._end(found)
                break
            *whole, rest = (self._held + data).split(b"\n")
            for line in whole:
                self._line(found, line, 1)
            self._held = rest
            if len(rest) > self._max_line_bytes:
                self._pass(rest)
        return found

    def _end(self, found: list[ScannedLine]) -> None:
        if self._at + self._n_passed + len(self._held) < self._n_bytes:
            raise ContentLost("the content has become shorter")
        self._line(found, self._held, 0)
        self._held, self.is_done = b"", True
        self._marks.clear()

    def _pass(self, data: bytes) -> None:
        """Leave bytes of a line behind that is too long anyway."""
        self._is_blank = self._is_blank and not data.strip()
        self._n_passed += len(data)
        self._held = b""

    def _line(self, found: list[ScannedLine], line: bytes, n_ends: int) -> None:
        offset, length = self._at, self._n_passed + len(line)
        number = self._number
        self._number += 1
        is_blank = self._is_blank and not line.strip()
        self._at, self._n_passed, self._is_blank = offset + length + n_ends, 0, True
        if is_blank:
            return
        first = number
        if self.n_lines < MAX_LINES and length <= self._max_line_bytes:
            name = custom_id_of(line, self._max_line_bytes)
            if name is not None:
                first = self._marks.setdefault(mark_of(name), number)
        if self.n_lines < MAX_LINES:
            double = doubled(first) if first != number else 0
            found.append(ScannedLine(number, offset, length - line.endswith(b"\r"), double))
        self.n_lines += 1


def opened(path: pathlib.Path, least_bytes: int) -> IO[bytes]:
    """A content. Raises ContentLost unless it has so many bytes at least, OSError when the disk refuses."""
    try:
        content = path.open("rb")
    except FileNotFoundError:
        raise ContentLost(f"{path} is gone") from None
    if os.fstat(content.fileno()).st_size < least_bytes:
        content.close()
        raise ContentLost(f"{path} has fewer than {least_bytes} bytes")
    return content


def read_at(path: pathlib.Path, offset: int, length: int) -> bytes:
    """Bytes of a content. Raises ContentLost unless all are there, OSError when the disk refuses."""
    with opened(path, offset + length) as content:
        content.seek(offset)
        return content.read(length)
