"""multipart/form-data (RFC 7578), read piece by piece: bytes in, the beginnings, contents and ends of parts out.

Owns the format and its limits. Does not own what the parts mean. Invariants: what is held back is shorter than a
boundary, or the headers of one part; linear time whatever the bytes are.
"""

from __future__ import annotations

import dataclasses
import enum
import re

from quire.serve.http.refusal import Refusal, bad_request

MAX_PART_HEADER_BYTES = 4096
MAX_PARTS = 16
_BOUNDARY = re.compile(
    r'multipart/form-data\s*;\s*boundary=("?)([0-9A-Za-z\'()+_,./:=? -]{1,70})\1\s*;?', re.IGNORECASE
)
_PARAMETER = re.compile(r';\s*(name|filename)="((?:[^"\\\r\n]|\\.)*)"', re.IGNORECASE)


@dataclasses.dataclass(frozen=True, slots=True)
class PartBegin:
    """A part begins; its content follows in pieces until the next part begins or the form ends."""

    name: str
    filename: str | None


@enum.unique
class _State(enum.Enum):
    PREAMBLE = "preamble"
    AFTER_BOUNDARY = "after_boundary"
    HEADERS = "headers"
    CONTENT = "content"
    DONE = "done"


def boundary_of(content_type: str) -> bytes:
    """The boundary that a content-type names. Raises a 415 Refusal if it is not multipart/form-data."""
    found = _BOUNDARY.fullmatch(content_type.strip())
    if found is None:
        raise Refusal(415, "Send content-type: multipart/form-data with a boundary.", code="unsupported_media_type")
    return found[2].encode()


class MultipartReader:
    """One form."""

    def __init__(self, boundary: bytes) -> None:
        self._mark = b"\r\n--" + boundary
        self._held = b"\r\n"  # the first boundary may stand at the very beginning
        self._state = _State.PREAMBLE
        self._n_parts = 0
        self._n_skipped = 0
        """Bytes at the beginning of a content that are not part of it."""

    def feed(self, data: bytes) -> list[PartBegin | bytes]:
        """What these bytes complete. Raises a 400 Refusal when they break the format."""
        self._held += data
        found: list[PartBegin | bytes] = []
        while self._step(found):
            pass
        return found

    def finish(self) -> None:
        """The body has ended: 400 unless the form has too."""
        if self._state is not _State.DONE:
            raise _broken("it ends before its last boundary")

    def _step(self, found: list[PartBegin | bytes]) -> bool:
        """One step through the bytes at hand; False when more are needed."""
        match self._state:
            case _State.PREAMBLE | _State.CONTENT:
                return self._read_content(found)
            case _State.AFTER_BOUNDARY:
                return self._read_boundary()
            case _State.HEADERS:
                return self._read_headers(found)
            case _State.DONE:
                self._held = b""
                return False

    def _read_content(self, found: list[PartBegin | bytes]) -> bool:
        at = self._held.find(self._mark)
        end = at if at >= 0 else max(len(self._held) - len(self._mark) + 1, 0)
        content, self._held = self._held[:end], self._held[end:]
        skipped = min(self._n_skipped, len(content))
        self._n_skipped -= skipped
        if self._state is _State.CONTENT and len(content) > skipped:
            found.append(content[skipped:])
        if at < 0:
            return False
        self._held = self._held[len(self._mark) :]
        self._state = _State.AFTER_BOUNDARY
        return True

    def _read_boundary(self) -> bool:
        if len(self._held) < 2:
            return False
        if self._held.startswith(b"--"):
            self._state = _State.DONE
            return True
        if not self._held.startswith(b"\r\n"):
            raise _broken("a boundary is followed by neither a line end nor --")
        self._n_parts += 1
        if self._n_parts > MAX_PARTS:
            raise _broken(f"it has more than {MAX_PARTS} parts")
        self._state = _State.HEADERS
        return True

    def _read_headers(self, found: list[PartBegin | bytes]) -> bool:
        end = self._held.find(b"\r\n\r\n")
        if end < 0 or end > MAX_PART_HEADER_BYTES:
            if len(self._held) > MAX_PART_HEADER_BYTES:
                raise _broken(f"a part has headers of more than {MAX_PART_HEADER_BYTES} bytes")
            return False
        head, self._held = self._held[:end], self._held[end + 2 :]
        found.append(_part(head))
        self._state, self._n_skipped = _State.CONTENT, 2  # the line end may belong to the next boundary
        return True


def _part(head: bytes) -> PartBegin:
    try:
        lines = head.decode().split("\r\n")
    except UnicodeDecodeError:
        raise _broken("a part's headers are not UTF-8") from None
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip().lower() == "content-disposition":
            fields = {key.lower(): text for key, text in _PARAMETER.findall(value)}
            if value.strip().lower().startswith("form-data") and "name" in fields:
                return PartBegin(fields["name"], fields.get("filename"))
    raise _broken("a part has no content-disposition: form-data with a name")


def _broken(why: str) -> Refusal:
    return bad_request(f"The form cannot be read: {why}.", code="invalid_form")
