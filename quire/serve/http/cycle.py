"""One request and its answer on a connection: uvicorn's, with what it lacks for HTTP/1.0 and for a lost client.

Invariant: an HTTP/1.0 client gets no chunks; where an answer's length is not known its body ends with the connection.
"""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


class Cycle(RequestResponseCycle):
    """`serve/http/exchange.py: Link` for the application; the rest is for the protocol."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.refused_status = 0
        self.scope["extensions"] = {"quire.link": self}  # type: ignore[dict-item]

    @property
    def is_lost(self) -> bool:
        """True if the connection ended before the answer was complete."""
        return self.disconnected and not self.response_complete and not self.refused_status

    def abort(self) -> None:
        """Cut the connection, dropping what the client has not read."""
        self.disconnected = True
        self.transport.abort()

    async def run_asgi(self, app: Any) -> None:
        """Run the application; logs what it raises."""
        try:
            await super().run_asgi(app)
        finally:
            self.scope["extensions"] = {}  # a cycle, which only the collector would end


class OldCycle(Cycle):
    """The same for HTTP/1.0, whose clients know neither chunks nor `100 Continue`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.waiting_for_100_continue = False
        self._ends_with_connection = False

    async def send(self, message: Any) -> None:
        """Send a part of the answer; what is sent to a client that left is dropped."""
        if self._ends_with_connection:
            self.expected_content_length = len(message.get("body", b""))
        elif message["type"] == "http.response.start" and self.scope["method"] != "HEAD":
            self._ends_with_connection = not any(name == b"content-length" for name, _ in message["headers"])
            self.chunked_encoding = False if self._ends_with_connection else None
        await super().send(message)
