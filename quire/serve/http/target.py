"""The request target, read once: key check, dialect, route and labels all look at the path that comes out here.

Owns the forms of RFC 9112, section 3.2. Does not own which paths there are (`app.py`).
Invariants: the path is the bytes that were sent, never unescaped nor made shorter, so that two places cannot read it
differently: `/v1%2fmodels`, `//v1/models` and `/v1/./models` are paths of their own, which lead nowhere.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from quire.serve.http.refusal import bad_request

_ABSOLUTE = re.compile(rb"https?://([^/?#]*)([/?].*)?", re.IGNORECASE)


class RequestTarget(NamedTuple):
    """What is asked for."""

    path: bytes
    query: bytes
    authority: bytes | None
    """Host and port of an absolute target, which count in place of the Host header (section 3.2.2)."""


def read_target(sent: bytes, method: bytes) -> RequestTarget:
    """The parts of a request target. Raises a 400 Refusal for what is no target of `method`."""
    if not sent.isascii() or b"#" in sent:
        raise bad_request("The request target must be ASCII, without a fragment (#).", code="bad_http")
    authority = None
    found = _ABSOLUTE.fullmatch(sent)
    if found is not None:
        authority, sent = found[1], found[2] or b"/"
        sent = b"/" + sent if sent.startswith(b"?") else sent
    path, _, query = sent.partition(b"?")
    if not path.startswith(b"/") and not (path == b"*" and method == b"OPTIONS"):
        raise bad_request("The request target must be a path, such as /v1/models, or an http URL.", code="bad_http")
    return RequestTarget(path, query, authority)
