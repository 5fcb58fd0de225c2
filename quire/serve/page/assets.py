"""The web page: its files, read once at start and served from memory, with their headers; what it proposes to ask."""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib

from quire.serve.http.exchange import Exchange
from quire.serve.http.refusal import Headers
from quire.serve.state import ServerState

STARTER_PROMPTS = [
    "What is 17 + 25?",
    "Hello! Who are you?",
    "Write a function that reverses a string.",
    "Extract name and age as JSON: Anna is 31 years old.",
]
"""What the web page proposes for an empty conversation where the operator proposes nothing."""
FOLDER = pathlib.Path(__file__).parent

_TYPES = {
    ".css": b"text/css; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".mjs": b"text/javascript; charset=utf-8",
    ".svg": b"image/svg+xml",
    ".woff2": b"font/woff2",
}
_NAMES = (
    *("icon.svg", "quire.css", "talk.css", "side.css"),
    *("quire.js", "dom.js", "client.js", "settings.js", "engine.js", "tree.js", "experts.js", "waterfall.js"),
    *("chat.js", "talk.js", "thread.js", "message.js", "markdown.js", "maths.js", "archive.js"),
    *("shelf.js", "export.js", "completion.js", "menu.js", "tools.js", "calls.js"),
    *("vendor/marked.esm.js", "vendor/purify.es.mjs", "vendor/highlight.min.js"),
    *("vendor/temml.mjs", "vendor/Temml-Local.css", "vendor/Temml.woff2"),
)
FILES = {
    "/": ("index.html", b"text/html; charset=utf-8"),
    **{f"/page/{name}": (name, _TYPES[pathlib.PurePath(name).suffix]) for name in _NAMES},
}
"""Path → file and media type. Nothing else of the folder is reachable."""

_SECURITY: Headers = [
    (b"content-security-policy", b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
     b"font-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
     b"require-trusted-types-for 'script'; trusted-types dompurify"),
    (b"referrer-policy", b"no-referrer"),
]  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class Asset:
    """One file of the web page, as an endpoint."""

    content: bytes
    media_type: bytes
    tag: bytes

    @classmethod
    def load(cls, name: str, media_type: bytes) -> Asset:
        """Read a file of the web page's folder (OSError when it is not installed)."""
        content = (FOLDER / name).read_bytes()
        return cls(content, media_type, b'"%b"' % hashlib.sha256(content).hexdigest()[:16].encode())

    async def __call__(self, _state: ServerState, exchange: Exchange) -> None:
        """Answer with the file, or 304 when the client has it."""
        headers = [(b"etag", self.tag), (b"cache-control", b"no-cache"), *_SECURITY]
        if exchange.header(b"if-none-match") == [self.tag]:
            await exchange.respond(304, b"", self.media_type, headers)
        else:
            await exchange.respond(200, self.content, self.media_type, headers)
