"""The lines of a batch, in and out, in OpenAI's format. Owns what makes a line good; does not own running it.

Invariant: every input line, however broken, becomes exactly one output line.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
import secrets

import msgspec

from quire.core.errors import shown
from quire.serve.http.decoding import BodyDecoder
from quire.serve.http.ignored import IgnoredParams
from quire.serve.http.loopback import LoopbackReply
from quire.serve.http.refusal import Refusal, bad_request, unsupported

MAX_ID_CHARS = 512
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")


class _Line(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    custom_id: str
    body: msgspec.Raw
    url: str
    method: str = "POST"


class _Streams(msgspec.Struct):
    stream: bool | None = None


class _Named(msgspec.Struct):
    custom_id: msgspec.Raw = msgspec.Raw(b"null")


_LINE: BodyDecoder[_Line] = BodyDecoder(_Line)
_STREAMS: BodyDecoder[_Streams] = BodyDecoder(_Streams)
_NAMED: BodyDecoder[_Named] = BodyDecoder(_Named)
_NAME: BodyDecoder[str] = BodyDecoder(str)
_MAX_NAME_BYTES = 12 * MAX_ID_CHARS + 2
"""As long as a good custom_id can be in JSON: two escapes a character, and the marks around it."""
_STRING = rb'"[^"\\]*(?:\\.[^"\\]*)*"'
_PAIR = rb"\s*" + _STRING + rb"\s*:\s*(?:" + _STRING + rb"|[\w.+-]+)\s*,"
_WRITTEN_ID = re.compile(rb"\s*\{(?>" + _PAIR + rb")*?\s*\"custom_id\"\s*:\s*(" + _STRING + rb")", re.S)
"""In what is no JSON further on: the id is found where it stands before the body, as clients write it."""


@dataclasses.dataclass(frozen=True, slots=True)
class BatchLine:
    """One good line."""

    custom_id: str
    url: str
    body: bytes


def read_line(data: bytes, max_bytes: int, ignored: IgnoredParams, endpoint: str | None = None) -> BatchLine:
    """Raises a Refusal that says what is wrong. endpoint: the only one allowed, None for any of `ENDPOINTS`."""
    if len(data) > max_bytes:
        raise too_long(max_bytes)
    line = _LINE.decode(data, ignored)
    if not 0 < len(line.custom_id) <= MAX_ID_CHARS:
        raise bad_request(f"custom_id must be 1 to {MAX_ID_CHARS} characters long.", "custom_id")
    if line.method != "POST":
        raise bad_request(f"method = {shown(line.method)} is not allowed: it must be POST.", "method")
    if endpoint is not None and line.url != endpoint:
        raise bad_request(f"url = {shown(line.url)} differs from the batch's endpoint, {endpoint}.", "url")
    if line.url not in ENDPOINTS:
        raise bad_request(f"url = {shown(line.url)} is none of {', '.join(ENDPOINTS)}.", "url")
    if _STREAMS.decode(line.body, ignored, "body").stream:
        raise unsupported("body.stream", "a batch has whole answers.")
    return BatchLine(line.custom_id, line.url, bytes(line.body))


def too_long(max_bytes: int) -> Refusal:
    """What is wrong with a longer line."""
    return bad_request(f"The line is longer than {max_bytes} bytes (--max-body-bytes).", code="line_too_long")


def custom_id_of(data: bytes, max_bytes: int) -> str | None:
    """The id of a line that is otherwise broken, if it can be read; also where the line is no JSON."""
    if len(data) > max_bytes:
        return None
    try:
        written = bytes(_NAMED.decode(data, IgnoredParams()).custom_id)
    except Refusal:
        found = _WRITTEN_ID.match(data)
        written = b"" if found is None else found[1]
    if len(written) > _MAX_NAME_BYTES:
        return None
    try:
        name = _NAME.decode(written, IgnoredParams())
    except Refusal:
        return None
    return name if len(name) <= MAX_ID_CHARS else None


def mark_of(custom_id: str) -> bytes:
    """What stands for an id where many are remembered: equal for equal ids alone."""
    return hashlib.blake2b(custom_id.encode(), digest_size=16).digest()


def double_problem(number: int, first: int | None) -> str:
    """Why line `number` is refused, whose custom_id line `first` has already, or one of which that is not known."""
    earlier = "an earlier line" if first is None else f"line {first + 1}"
    return f"line {number + 1}: {earlier} has this custom_id already."


def answered(custom_id: str | None, reply: LoopbackReply) -> bytes:
    """The output line of a line that an endpoint answered, well or badly; without its line end."""
    response = {"status_code": reply.status, "request_id": reply.request_id, "body": msgspec.Raw(reply.body)}
    return msgspec.json.encode({"id": _fresh_id(), "custom_id": custom_id, "response": response, "error": None})


def failed(custom_id: str | None, code: str | None, message: str) -> bytes:
    """The output line of a line that reached no endpoint."""
    error = {"code": code, "message": message}
    return msgspec.json.encode({"id": _fresh_id(), "custom_id": custom_id, "response": None, "error": error})


class _Said(msgspec.Struct):
    message: str


class _FailedBody(msgspec.Struct):
    error: _Said


class _FailedResponse(msgspec.Struct):
    body: _FailedBody


class _FailedLine(msgspec.Struct):
    custom_id: str | None = None
    response: _FailedResponse | None = None
    error: _Said | None = None


def reason_of(output: bytes) -> str:
    """What a person is told of an output line that holds no good answer: which line it is, and what was wrong."""
    line = msgspec.json.decode(output, type=_FailedLine)
    if line.error is not None:
        return line.error.message
    assert line.response is not None, "a line that did not reach an endpoint has an error"
    return f"custom_id {shown(line.custom_id)}: {line.response.body.error.message}"


def _fresh_id() -> str:
    return f"batch_req_{secrets.token_hex(12)}"
