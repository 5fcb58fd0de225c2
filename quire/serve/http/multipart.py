"""multipart/form-data (RFC 7578), read piece by piece: bytes in, the beginnings, contents and ends of parts out.

The format is python-multipart's business; owns its limits and what a broken form is told. Does not own what the parts
mean. Invariants: what is held back is shorter than a boundary, or the headers of one part; a content is never copied
beyond the piece that it came in; linear time whatever the bytes are.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import AsyncIterator

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from quire.serve.http.refusal import Refusal, bad_request

MAX_PART_HEADER_BYTES = 4096
MAX_PART_HEADERS = 16
MAX_PARTS = 16
MAX_BOUNDARY_BYTES = 70
FEED_BYTES = 8192
"""Bytes read in one go. Those that look like boundaries and are none take some ten milliseconds."""
TURN_S = 0.005
"""How long reading keeps the event loop from others."""

# It warns of each form that is broken, with bytes of the client in the text.
logging.getLogger("python_multipart").setLevel(logging.ERROR)


@dataclasses.dataclass(frozen=True, slots=True)
class PartBegin:
    """A part begins; its content follows in pieces until the next part begins or the form ends."""

    name: str
    filename: str | None


def boundary_of(content_type: bytes) -> bytes:
    """The boundary that a content-type names. Raises a 415 Refusal if it is not multipart/form-data."""
    media, options = parse_options_header(content_type)
    boundary = options.get(b"boundary", b"")
    if media != b"multipart/form-data" or not 0 < len(boundary) <= MAX_BOUNDARY_BYTES:
        raise Refusal(415, "Send content-type: multipart/form-data with a boundary.", code="unsupported_media_type")
    return boundary


async def read_parts(chunks: AsyncIterator[bytes], boundary: bytes) -> AsyncIterator[PartBegin | bytes]:
    """The parts of a form whose bytes come in chunks. Raises a 400 Refusal when they are no form."""
    reader, turn_s = MultipartReader(boundary), time.monotonic()
    async for chunk in chunks:
        for at in range(0, len(chunk), FEED_BYTES):
            for found in reader.feed(chunk[at : at + FEED_BYTES]):
                yield found
            if time.monotonic() - turn_s > TURN_S:
                await asyncio.sleep(0)
                turn_s = time.monotonic()
    reader.finish()


class MultipartReader:
    """One form."""

    def __init__(self, boundary: bytes) -> None:
        self._found: list[PartBegin | bytes] = []
        self._field = bytearray()
        """Name of the header that is being read."""
        self._value = bytearray()
        self._disposition: bytes | None = None
        self._n_header_bytes = 0
        self._n_parts = 0
        self._is_complete = False
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin_part,
                "on_header_field": self._add_field,
                "on_header_value": self._add_value,
                "on_header_end": self._end_header,
                "on_headers_finished": self._end_headers,
                "on_part_data": self._add_content,
                "on_end": self._end,
            },
            max_header_count=MAX_PART_HEADERS,
            max_header_size=MAX_PART_HEADER_BYTES,
        )

    def feed(self, data: bytes) -> list[PartBegin | bytes]:
        """What these bytes complete. Raises a 400 Refusal when they break the format."""
        self._found = []
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise _broken(_worded(str(error))) from None
        return self._found

    def finish(self) -> None:
        """The body has ended: 400 unless the form has too."""
        if not self._is_complete:
            raise _broken("it ends before its last boundary")

    def _begin_part(self) -> None:
        self._n_parts += 1
        if self._n_parts > MAX_PARTS:
            raise _broken(f"it has more than {MAX_PARTS} parts")
        self._disposition, self._n_header_bytes = None, 0

    def _add_field(self, data: bytes, start: int, end: int) -> None:
        self._count_header(end - start)
        self._field += data[start:end]

    def _add_value(self, data: bytes, start: int, end: int) -> None:
        self._count_header(end - start)
        self._value += data[start:end]

    def _count_header(self, n_bytes: int) -> None:
        self._n_header_bytes += n_bytes
        if self._n_header_bytes > MAX_PART_HEADER_BYTES:
            raise _broken(_TOO_LONG)

    def _end_header(self) -> None:
        if self._field.lower() == b"content-disposition" and self._disposition is None:
            self._disposition = bytes(self._value)
        self._field, self._value = bytearray(), bytearray()

    def _end_headers(self) -> None:
        kind, options = parse_options_header(self._disposition)
        if kind != b"form-data" or b"name" not in options:
            raise _broken("a part has no content-disposition: form-data with a name")
        try:
            filename = options.get(b"filename")
            self._found.append(PartBegin(options[b"name"].decode(), None if filename is None else filename.decode()))
        except UnicodeDecodeError:
            raise _broken("a part's headers are not UTF-8") from None

    def _add_content(self, data: bytes, start: int, end: int) -> None:
        self._found.append(data[start:end])

    def _end(self) -> None:
        self._is_complete = True


_TOO_LONG = f"a part has headers of more than {MAX_PART_HEADER_BYTES} bytes, or more than {MAX_PART_HEADERS} of them"
_WORDS = (("Maximum header", _TOO_LONG), ("oundary", "it does not begin with its boundary, or one is not ended"))


def _worded(error: str) -> str:
    """The library's message without the client's bytes."""
    return next((text for mark, text in _WORDS if mark in error), "the headers of a part are no headers")


def _broken(why: str) -> Refusal:
    return bad_request(f"The form cannot be read: {why}.", code="invalid_form")
