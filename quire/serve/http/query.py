"""The query of a request: its fields, with those that nothing knows noted as ignored. Owns no meaning of a field."""

from __future__ import annotations

import urllib.parse
from collections.abc import Collection

from quire.serve.http.exchange import Exchange
from quire.serve.http.refusal import bad_request

MAX_FIELDS = 16


def query_of(exchange: Exchange, known: Collection[str]) -> dict[str, list[str]]:
    """The values of each known field, in order. Raises a 400 Refusal for a query that cannot be read, and in strict
    mode for a field that is not known."""
    text = exchange.scope.get("query_string", b"")
    try:
        pairs = urllib.parse.parse_qsl(text.decode("ascii"), keep_blank_values=True, max_num_fields=MAX_FIELDS)
    except ValueError:  # UnicodeDecodeError is one
        message = f"The query cannot be read: it must be ASCII, with at most {MAX_FIELDS} fields."
        raise bad_request(message, code="invalid_query") from None
    found: dict[str, list[str]] = {}
    for name, value in pairs:
        if name in known:
            found.setdefault(name, []).append(value)
        else:
            exchange.ignored.note_member("", name, known)
    return found
