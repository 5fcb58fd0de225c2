"""Text between tool calls: white space that only separates them is dropped, the rest is the content."""

from __future__ import annotations

from quire.text.reasoning import MAX_SPACE, SPACE


class Borders:
    """Of one message. White space at the beginning or behind a call waits for what follows."""

    def __init__(self) -> None:
        self._space = ""
        self._is_at = True
        self._n_calls = 0

    def text(self, text: str) -> str:
        """What of the text is content now."""
        if self._is_at:
            text = self._space + text
            self._space = ""
            if not text.strip(SPACE) and len(text) <= MAX_SPACE:
                self._space = text
                return ""
            self._is_at = False
        return text

    def call(self) -> None:
        """A call begins."""
        self._space, self._is_at = "", True
        self._n_calls += 1

    def finish(self) -> str:
        """What waited, at the end of the text."""
        return "" if self._n_calls else self._space
