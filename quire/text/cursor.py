"""Going through a growing text as long as it fits a head. Owns what may be unfinished."""

from __future__ import annotations

import re
from typing import Final

from quire.text.reasoning import MAX_SPACE

MAX_WORD: Final = 80
_SPACES = re.compile(rf"[ \t\r\n]{{0,{MAX_SPACE}}}")
_WORD = re.compile(rf"[a-zA-Z0-9_.\-]{{1,{MAX_WORD + 1}}}")


class Unfinished(Exception):
    """The text ends where it fits so far."""


class Cursor:
    """A place in a text. What has been said of it stays true when the text grows."""

    __slots__ = ("at", "text")

    def __init__(self, text: str, at: int) -> None:
        self.text, self.at = text, at

    def takes(self, mark: str) -> bool:
        """Go on behind `mark` if it stands here. Unfinished if it may still come."""
        if self.text.startswith(mark, self.at):
            self.at += len(mark)
            return True
        if len(self.text) - self.at < len(mark) and mark.startswith(self.text[self.at :]):
            raise Unfinished
        return False

    def space(self) -> None:
        """Go on behind white space, which is bounded."""
        found = _SPACES.match(self.text, self.at)
        self.at = self.at if found is None else found.end()

    def word(self) -> str:
        """Go on behind a name; empty if none stands here, or one that is too long. Unfinished if it may go on."""
        return self.match(_WORD, MAX_WORD)

    def match(self, pattern: re.Pattern[str], most: int) -> str:
        """The same for a pattern, of which as many characters as there are fit, up to one more than `most`."""
        found = pattern.match(self.text, self.at)
        if found is None:
            if self.at == len(self.text):
                raise Unfinished
            return ""
        if len(found.group()) > most:
            return ""
        if found.end() == len(self.text):
            raise Unfinished
        self.at = found.end()
        return found.group()
