"""Lists that come in parts: `limit` and `after` of a query, and the shape of the answer. Owns no records."""

from __future__ import annotations

import dataclasses
from typing import Any

from quire.core.errors import shown
from quire.serve.http.exchange import Exchange
from quire.serve.http.query import query_of
from quire.serve.http.refusal import bad_request
from quire.serve.openai.schema import JsonObject

MAX_VALUE_CHARS = 128


@dataclasses.dataclass(frozen=True, slots=True)
class ListQuery:
    """What a query asks for."""

    limit: int
    after: str | None
    values: dict[str, str]

    def listed(self, found: list[Any]) -> JsonObject:
        """The answer; `found` has one record more than `limit` if there are more."""
        records = found[: self.limit]
        ids = [record.id for record in records]
        return {
            "object": "list",
            "data": records,
            "first_id": ids[0] if ids else None,
            "last_id": ids[-1] if ids else None,
            "has_more": len(found) > self.limit,
        }


def list_query_of(exchange: Exchange, known: tuple[str, ...] = (), *, most: int = 100, default: int = 20) -> ListQuery:
    """Raises a 400 Refusal for a repeated field, and for a limit out of range."""
    values: dict[str, str] = {}
    for name, given in query_of(exchange, ("limit", "after", "order", *known)).items():
        if len(given) > 1:
            raise bad_request(f"{name} is given {len(given)} times in the query: once is enough.", name)
        if len(given[0]) > MAX_VALUE_CHARS:
            raise bad_request(f"{name} is longer than {MAX_VALUE_CHARS} characters.", name)
        values[name] = given[0]
    if values.pop("order", "desc") != "desc":
        raise bad_request("order must be desc.", "order")
    limit = values.pop("limit", str(default))
    if not limit.isdecimal() or not 1 <= int(limit) <= most:
        raise bad_request(f"limit = {shown(limit)} is not allowed: it must be 1 to {most}.", "limit")
    return ListQuery(int(limit), values.pop("after", None), values)
