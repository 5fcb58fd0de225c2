"""A light parser of server-sent events: bytes in any cuts, `data` payloads out."""

from __future__ import annotations

DONE = b"[DONE]"


class EventParser:
    """Feeds on chunks of a body. Comments and other fields than `data` are skipped; each `data` line is one payload.

    OpenAI-compatible servers send one `data` line an event, so events of several lines are not joined.
    """

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> list[bytes]:
        """The payloads that `chunk` completes, in order."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]
