"""The web page: its files are read once at start and served from memory. Owns their types and security headers."""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib

from quire.serve.exchange import Exchange
from quire.serve.refusal import Headers
from quire.serve.state import ServerState

FOLDER = pathlib.Path(__file__).parent / "page"

JAVASCRIPT = b"text/javascript; charset=utf-8"
FILES = {
    "/": ("index.html", b"text/html; charset=utf-8"),
    "/page/quire.css": ("quire.css", b"text/css; charset=utf-8"),
    "/page/quire.js": ("quire.js", JAVASCRIPT),
    "/page/client.js": ("client.js", JAVASCRIPT),
    "/page/engine.js": ("engine.js", JAVASCRIPT),
    "/page/tree.js": ("tree.js", JAVASCRIPT),
    "/page/waterfall.js": ("waterfall.js", JAVASCRIPT),
    "/page/icon.svg": ("icon.svg", b"image/svg+xml"),
}
"""Path → file and media type. Nothing else of the folder is reachable."""

_SECURITY: Headers = [
    (b"content-security-policy", b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
     b"connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"),
    (b"referrer-policy", b"no-referrer"),
]  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class Asset:
    """One file of the page, as an endpoint."""

    content: bytes
    media_type: bytes
    tag: bytes

    @classmethod
    def load(cls, name: str, media_type: bytes) -> Asset:
        """Read a file of the page's folder (OSError when it is not installed)."""
        content = (FOLDER / name).read_bytes()
        return cls(content, media_type, b'"%b"' % hashlib.sha256(content).hexdigest()[:16].encode())

    async def __call__(self, _state: ServerState, exchange: Exchange) -> None:
        """Answer with the file, or 304 when the client has it."""
        headers = [(b"etag", self.tag), (b"cache-control", b"no-cache"), *_SECURITY]
        if exchange.header(b"if-none-match") == [self.tag]:
            await exchange.respond(304, b"", self.media_type, headers)
        else:
            await exchange.respond(200, self.content, self.media_type, headers)
