"""Request fields that are let through without being used: what a client is told of them, and what the operator is.

Owns the header `X-Ignored-Params`, the limits on names, and who refuses them (`--strict`, `X-Strict: 1`). Does not own
which fields these are (`unknown_fields.py`, and the endpoints that look at values).
Invariants: a value is never repeated; header, log and metric are bounded whatever a body has; in strict mode the first
such field is a 400 that names it.
"""

from __future__ import annotations

import logging
import re
import urllib.parse
from collections.abc import Collection
from typing import NoReturn

from quire.core.errors import shown
from quire.core.spelling import did_you_mean
from quire.serve.http.refusal import Headers, bad_request

HEADER = b"x-ignored-params"
STRICT_HEADER = b"x-strict"
_STRICT = {b"1": True, b"true": True, b"yes": True, b"on": True}
_STRICT |= {b"0": False, b"false": False, b"no": False, b"off": False, b"": False}
MAX_NAMES = 16
"""Names that one answer lists; of more only the number is said."""
MAX_NAME_CHARS = 64
MAX_LOGGED = 256
"""Names that one process logs, each once."""
OTHER = "other"
_COUNTED = """cache_control client_metadata context_management id include keep_alive logprobs max_tool_calls metadata
    modalities name num_ctx options prediction prompt_cache_key prompt_cache_options prompt_cache_retention provider
    provider_specific_fields reasoning reasoning_details service_tier signature store stream_options summary thread
    tool_choice tools truncation type verbosity web_search_options"""
COUNTED = frozenset(_COUNTED.split())
"""Names that the metric tells apart, by the last part of a path; all others are `OTHER`."""

_PLAIN = "[]$-"
"""Besides letters, digits and `_.-~`, which are never escaped."""
_INDEX = re.compile(r"\[\d+\]")

logger = logging.getLogger("quire.serve")


def asks_strict(values: Collection[bytes]) -> bool:
    """What the values of `X-Strict` say: one that is true counts. Raises a 400 Refusal for one that says neither."""
    answers = [_STRICT.get(value.strip().lower()) for value in values]
    for value, found in zip(values, answers, strict=True):
        if found is None:
            raise bad_request(
                f"The header X-Strict = {shown(value.decode('latin-1'))} is not allowed: "
                "it must be 1, true, yes or on, or 0, false, no, off or empty."
            )
    return any(answers)


class IgnoredParams:
    """The ignored fields of one request."""

    def __init__(self) -> None:
        self.is_strict = False
        """True: the client or the operator wants them refused."""
        self.n = 0
        """Fields, repetitions included."""
        self.names: dict[str, tuple[str, Collection[str]]] = {}
        """The first of them, escaped and without places in lists, in the order of the request → what is needed to guess
        what was meant: the name, and those that are used in its place."""
        self.n_unnamed = 0
        """Fields that are not among these; a name beyond the limit counts as often as it comes."""
        self.counts: dict[str, int] = {}
        """By the names of the metric."""

    def note(self, param: str) -> None:
        """A field does nothing. Raises a 400 Refusal in strict mode. param: its path, such as `messages[3].id`."""
        path, dot, name = param.rpartition(".")
        self.note_member(path + dot, name)

    def note_member(self, path: str, name: str, known: Collection[str] = ()) -> None:
        """The same for a member of the object whose path this is, with its point. Quick, for bodies of nothing else.
        known: names that are used there, for one that nothing knows."""
        if self.is_strict:
            self._refuse(path + name[: 4 * MAX_NAME_CHARS], meant(name, known))
        self.n += 1
        counted = name.partition("[")[0] if len(name) <= MAX_NAME_CHARS else OTHER
        counted = counted if counted in COUNTED else OTHER
        self.counts[counted] = self.counts.get(counted, 0) + 1
        if self.n_unnamed:
            self.n_unnamed += 1
            return
        written = escaped(path + name[: 4 * MAX_NAME_CHARS])
        if written in self.names:
            return
        if len(self.names) < MAX_NAMES:
            self.names[written] = name, known
        else:
            self.n_unnamed = 1

    def _refuse(self, param: str, hint: str) -> NoReturn:
        text = param if len(param) <= MAX_NAME_CHARS else param[:MAX_NAME_CHARS] + "…"
        raise bad_request(
            f"{shown(text)} would be ignored{hint}, and this request is strict: leave the field out, or do without "
            "X-Strict (and the operator without --strict).",
            text,
            "unknown_parameter",
        )

    def headers(self) -> Headers:
        """The header that lists them, if there are any."""
        if not self.names:
            return []
        more = f", +{self.n_unnamed} more" if self.n_unnamed else ""
        return [(HEADER, (", ".join(self.names) + more).encode("ascii"))]


class IgnoredLog:
    """What one process has said of ignored fields: each name once, a bounded number of them."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def take(self, ignored: IgnoredParams) -> None:
        """Log the names of a request that were not logged before."""
        for name, (last, known) in ignored.names.items():
            if name in self._logged or len(self._logged) > MAX_LOGGED:
                continue
            self._logged.add(name)
            if len(self._logged) > MAX_LOGGED:
                logger.warning("more than %d names of ignored request fields: further ones are not logged", MAX_LOGGED)
                return
            logger.warning(
                "the request field %s is ignored%s (said once; X-Ignored-Params lists them, --strict refuses them)",
                name,
                meant(last, known),
            )


def meant(name: str, known: Collection[str]) -> str:
    """` (did you mean X?)` for a name that is nearly one of those that are used there."""
    if name in COUNTED or len(name) > MAX_NAME_CHARS:
        return ""
    hint = did_you_mean(name, known).removeprefix("; ")
    return f" ({hint})" if hint else ""


def escaped(param: str) -> str:
    """A field's path as a header and a log can have it: ASCII, no comma, no space, of bounded length."""
    name = urllib.parse.quote(_INDEX.sub("[]", param[: 4 * MAX_NAME_CHARS]), safe=_PLAIN, errors="replace")
    return name if len(name) <= MAX_NAME_CHARS else name[:MAX_NAME_CHARS] + "~"
