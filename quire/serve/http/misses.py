"""Requests that hit no endpoint: what a client is told that has the path or the method wrong.

Owns the guess at what was meant. Does not own routing. Invariant: a path is repeated in part only.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from quire.core.errors import shown
from quire.core.spelling import did_you_mean
from quire.serve.http.refusal import Headers, Refusal

MAX_PATH_CHARS = 80
MAX_METHOD_CHARS = 20
_SLASHES = re.compile("/+")


def no_such_path(path: str, known: Collection[str]) -> Refusal:
    """A 404. known: the paths of endpoints."""
    return Refusal(404, f"There is nothing at {_cut(path)}{_meant(path, known)}", code="not_found")


def wrong_method(path: str, method: str, headers: Headers) -> Refusal:
    """A 405. headers: with `allow`."""
    allowed = next((value.decode("latin-1") for name, value in headers if name == b"allow"), "")
    methods = " or ".join(sorted(allowed.replace(" ", "").split(",")))
    asked = "GET" if method == "HEAD" else method[:MAX_METHOD_CHARS]  # their answers are of one length
    message = f"{_cut(path)} does not take the method {asked}: it takes {methods}."
    return Refusal(405, message, code="method_not_allowed", headers=headers)


def _meant(path: str, known: Collection[str]) -> str:
    if len(path) > MAX_PATH_CHARS:
        return "."
    plain = _SLASHES.sub("/", path).rstrip("/")
    if plain in known:
        return f": did you mean {plain}?"
    if f"/v1{plain}" in known:
        return f": did you mean /v1{plain}? The base_url of an OpenAI client ends in /v1."
    once = plain.removeprefix("/v1")
    if plain.startswith("/v1/v1/") and once in known:
        return f": did you mean {once}? There is one /v1 too many, that of the base_url or the client's own."
    ends = [each for each in known if each.count("/") > 1 and plain.endswith(each)]
    if ends:
        return f": did you mean {max(ends, key=len)}? (--root-path takes off what a proxy puts before it.)"
    return did_you_mean(plain, known) or ". /openapi.json lists what there is."


def _cut(path: str) -> str:
    return shown(path if len(path) <= MAX_PATH_CHARS else path[:MAX_PATH_CHARS] + "…")
