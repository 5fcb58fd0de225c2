"""From body bytes to a typed request. Owns the translation of msgspec's errors into 400s that name the field.

Types refuse unknown fields; a body that has some is filtered (`unknown_fields.py`) and decoded again.
Invariants: any bytes give either a value or a Refusal; a client's value is repeated only in part, never whole.
"""

from __future__ import annotations

import itertools
import re
import sys
from typing import Any, Generic, TypeVar

import msgspec

from quire.core.errors import SHOWN_CHARS, shown
from quire.core.prompts import ROLES
from quire.serve.http.ignored import IgnoredParams
from quire.serve.http.json_scan import IdList, count_body, cuts, find_ids, largest_member, windows
from quire.serve.http.refusal import MISSING, Refusal, bad_request, unsupported
from quire.serve.http.unknown_fields import Refused, UnknownFieldFilter

T = TypeVar("T")

LARGE_BYTES = 64 * 1024
"""Longer bodies are looked at before they are decoded."""
MAX_VALUES = 1 << 17
"""Strings, lists, objects, booleans and nulls of a body: decoding so many takes 25 ms at most, in one call."""
MAX_NUMBERS = 1 << 19
"""Numbers of a body besides its token ids: 15 ms."""
MAX_ESCAPES = 1 << 22
"""Backslashes of a body: 25 ms."""
_IDS = msgspec.json.Decoder(list[int])

_UNKNOWN = re.compile(r"Object contains unknown field `")
_MISSING = re.compile(r"Object missing required field `(.*?)`")
_UNPAIRED = re.compile(
    rb"(?<!\\)(?:\\\\)*(\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])"
    rb"|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F][0-9a-fA-F]{2})"
)
"""Behind an even number of backslashes, which are half as many of a text."""
_TOKEN_ID = re.compile(r"-?(?:0|[1-9][0-9]*)")
"""As JSON writes it."""
_WHERE = re.compile(r" - at (?:`key` in )?`\$\.?([^`]*)`$")


class BodyDecoder(Generic[T]):
    """Decodes JSON bodies of one type. Large ones are looked at first (`json_scan.py`)."""

    def __init__(self, kind: Any, ids_field: str = "", refused: Refused | None = None) -> None:
        """ids_field: the one that may hold very many token ids, if there is one. refused: unknown fields that may not
        be ignored."""
        self._decoder: msgspec.json.Decoder[T] = msgspec.json.Decoder(kind)
        self._ids_field = ids_field
        self._unknown_fields = UnknownFieldFilter(kind, refused or {})

    def decode(
        self, body: bytes | msgspec.Raw, ignored: IgnoredParams, within: str = "", most_ids: int = sys.maxsize
    ) -> T:
        """The value. Unknown fields that do no harm are noted in `ignored`. Raises a 400 Refusal whose param is the
        path of the field at fault, which begins with `within`. most_ids: longer lists of token ids need not be decoded,
        as they are of no use; others may be all the same."""
        if isinstance(body, bytes) and len(body) > LARGE_BYTES:
            return self._decode_large(body, ignored, most_ids)
        return self._decode(body, ignored, within)

    def _decode_large(self, body: bytes, ignored: IgnoredParams, most_ids: int) -> T:
        found = count_body(body, MAX_VALUES)
        if found.n_others > MAX_VALUES:
            raise _too_much(body, f"more than {MAX_VALUES} strings, lists, objects, booleans and nulls")
        if found.n_escapes > MAX_ESCAPES:
            raise _too_much(body, f"{found.n_escapes} backslashes, at most {MAX_ESCAPES} are allowed")
        if found.n_numbers <= MAX_NUMBERS:
            return self._decode(body, ignored)
        ids = find_ids(body, self._ids_field.encode()) if self._ids_field else None
        n_ids = 0 if ids is None else sum(body.count(b",", start, stop) for start, stop in windows(ids.start, ids.stop))
        if ids is None or found.n_numbers - n_ids > MAX_NUMBERS:
            allowed = f"at most {MAX_NUMBERS} are allowed outside of token ids"
            raise _too_much(body, f"about {found.n_numbers} numbers, {allowed}")
        value = self._decode(body[: ids.start] + b"[]" + body[ids.stop :], ignored)
        setattr(value, self._ids_field, _ids_of(body, ids, self._ids_field, most_ids))
        return value

    def _decode(self, body: bytes | msgspec.Raw, ignored: IgnoredParams, within: str = "") -> T:
        if isinstance(body, bytes) and not body.strip():
            raise bad_request("The request has no body: send a JSON object.", code="invalid_json")
        try:
            try:
                return self._decoder.decode(body)
            except msgspec.ValidationError as error:
                if not _UNKNOWN.match(str(error)):
                    raise
            return self._decoder.decode(self._unknown_fields.filtered(body, within, ignored))
        except msgspec.ValidationError as error:
            raise _explained(str(error), within, body) from None
        except msgspec.DecodeError as error:
            raise bad_request(f"The body is not valid JSON: {_malformed(error, body)}.", code="invalid_json") from None
        except UnicodeDecodeError:
            raise bad_request("The body is not valid UTF-8.", code="invalid_json") from None
        except RecursionError:
            raise bad_request("The body is nested too deeply.", code="invalid_json") from None


def _malformed(error: msgspec.DecodeError, body: bytes | msgspec.Raw) -> str:
    """What is wrong with the body. Of half a surrogate pair the library says that the input was truncated."""
    said = str(error)[:SHOWN_CHARS]
    half = _UNPAIRED.search(bytes(body)) if "truncated" in said or "surrogate" in said else None
    return said if half is None else f"{half[1].decode()} (byte {half.start(1)}) is half of a surrogate pair"


def _ids_of(body: bytes, found: IdList, field: str, most: int) -> list[int] | list[list[int]]:
    """The token ids of a list, or of the lists in it, decoded a window at a time.

    To free a list of millions takes a fifth of a second in one call: one that is of no use is refused before.
    """
    for start, stop in found.inner or [(found.start, found.stop)]:
        n_ids = 1 + sum(body.count(b",", *window) for window in windows(start, stop))
        if n_ids > max(most, MAX_NUMBERS):
            limits = f"at most {max(most, MAX_NUMBERS)} are read; the context holds {most}"
            raise bad_request(f"{field} has {n_ids} token ids, {limits}.", field, "context_length_exceeded")
    if not found.inner:
        return _numbers(body, found.start, found.stop, field)
    gaps = [body[start:stop] for (_, start), (stop, _) in itertools.pairwise([(0, found.start + 1), *found.inner])]
    gaps.append(body[found.inner[-1][1] : found.stop - 1])
    if gaps[0].strip() or gaps[-1].strip() or any(gap.strip() != b"," for gap in gaps[1:-1]):
        raise bad_request(f"{field} mixes token ids and lists of token ids, or is no JSON: use one kind.", field)
    return [_numbers(body, start, stop, field) for start, stop in found.inner]


def _numbers(body: bytes, start: int, stop: int, field: str) -> list[int]:
    token_ids: list[int] = []
    pieces = cuts(body, start + 1, stop - 1)
    for begin, end in pieces:
        piece = body[begin:end]
        try:
            new = _IDS.decode(b"[" + piece + b"]")
        except msgspec.ValidationError as error:
            raise bad_request(f"{field}: {_cut(str(error).partition(' - at')[0])}.", field, "invalid_type") from None
        except msgspec.DecodeError as error:
            raise bad_request(f"{field} is not valid JSON: {_cut(str(error))}.", field, "invalid_json") from None
        if not new and len(pieces) > 1:
            raise bad_request(f"{field} is not valid JSON: a comma without a number.", field, "invalid_json")
        token_ids += new
    return token_ids


def _too_much(body: bytes, what: str) -> Refusal:
    key = largest_member(body, MAX_VALUES).decode("utf-8", "replace")[:SHOWN_CHARS]
    most = f" Most of it is {key}." if key else ""
    return bad_request(f"The body has {what}: send less in one request.{most}", key or None, "body_too_complex")


def _explained(error: str, within: str, body: bytes | msgspec.Raw) -> Refusal:
    """msgspec's message → 400 with `param`, and with the value where that is small."""
    where = _WHERE.search(error)
    path = ".".join(filter(None, (within, where.group(1) if where else "")))
    problem = error[: where.start()] if where else error
    missing = _MISSING.match(problem)
    if missing is not None:
        param = _joined(path, missing.group(1))
        return bad_request(f"{param} is missing.", param, MISSING)
    param = path.removesuffix("[...]")
    if ".content[" in param and param.endswith(".type"):
        return unsupported(param, f"message parts must be text. {_cut(problem)}.")
    if where is not None and where.group(0).startswith(" - at `key`"):
        said = f"{param}: {_wrong_key(body, where.group(1))}: it must be a token id in digits."
        return bad_request(said, param, "invalid_type")
    if param.endswith(".role") and problem.startswith("Invalid value"):
        return bad_request(f"{param}: {_cut(problem)}: it must be one of {', '.join(ROLES)}.", param, "invalid_type")
    found = _found(body, where.group(1)) if where else None
    named = param if found is None else f"{param} = {shown(found)}"
    return bad_request(f"{named or 'The body'}: {_cut(problem)}.", param or None, "invalid_type")


def _found(body: bytes | msgspec.Raw, path: str) -> str | float | bool | None:
    """What stands at a path of names, in a body that is not long; None for what is no plain value."""
    value = _standing(body, path)
    return value if isinstance(value, str | int | float) else None


def _standing(body: bytes | msgspec.Raw, path: str) -> Any:
    """Likewise; None for what cannot be found."""
    if not isinstance(body, bytes) or len(body) > LARGE_BYTES or not path or "[" in path:
        return None
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _wrong_key(body: bytes | msgspec.Raw, path: str) -> str:
    """The first key that is no whole number, of an object whose keys are; its place stands at a path of names."""
    found = _standing(body, path)
    keys = found if isinstance(found, dict) else {}
    wrong = next((key for key in keys if not _TOKEN_ID.fullmatch(key)), None)
    return "a key is wrong" if wrong is None else f"the key {shown(wrong)} is wrong"


def _joined(path: str, field: str) -> str:
    return f"{path}.{field}" if path else field


def _cut(text: str) -> str:
    text = text.replace("`", "").replace(" | null", "")
    return text if len(text) <= SHOWN_CHARS else text[: SHOWN_CHARS - 1] + "…"
