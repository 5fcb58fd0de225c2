"""What the fuzz sends: good requests, ways to break them, and ways to deliver them. A case is drawn from its number."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import random
import socket
import ssl
import struct
import time

KEY = "qk-5ecret-0f-the-fuzz"
MARK = b"fUzzMaRk"
"""In every request, in no line of the log."""
HOST = b"host: localhost\r\n"
AUTH = b"authorization: Bearer " + KEY.encode() + b"\r\n"
LABEL = b"x-request-id: " + MARK + b"\r\nx-note: " + MARK + b"\r\n"


def _json(path: bytes, body: dict[str, object], more: bytes = b"", version: bytes = b"1.1") -> bytes:
    data = json.dumps(body).encode()
    fields = HOST + AUTH + LABEL + b"content-type: application/json\r\ncontent-length: %d\r\n" % len(data) + more
    return b"POST %b HTTP/%b\r\n%b\r\n%b" % (path, version, fields, data)


def _chunked(path: bytes, data: bytes, extension: bytes = b"", trailers: bytes = b"") -> bytes:
    head = b"POST %b HTTP/1.1\r\n%bcontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
    pieces = [data[at : at + 7] for at in range(0, len(data), 7)]
    chunks = b"".join(b"%x%b\r\n%b\r\n" % (len(piece), extension, piece) for piece in pieces)
    return head % (path, HOST + AUTH + LABEL) + chunks + b"0\r\n" + trailers + b"\r\n"


def _get(target: bytes, more: bytes = b"", method: bytes = b"GET", version: bytes = b"1.1") -> bytes:
    return b"%b %b HTTP/%b\r\n%b\r\n" % (method, target, version, HOST + AUTH + LABEL + more)


_TEXT = {"model": "fake", "prompt": MARK.decode(), "max_tokens": 5}
_FORM = (
    b'--xyz\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--xyz\r\ncontent-disposition: form-data; '
    b'name="file"; filename="' + MARK + b'"\r\n\r\n{"custom_id":"a"}\r\n--xyz--\r\n'
)
SAMPLES = [
    _get(b"/version"), _get(b"/v1/models/" + MARK), _get(b"/", b"if-none-match: \"x\"\r\n"), _get(b"/metrics"),
    _get(b"/v1/files?limit=3&after=" + MARK), _get(b"/health", version=b"1.0"), _get(b"/version", method=b"HEAD"),
    _get(b"http://localhost/v1/models?" + MARK), _get(b"*", method=b"OPTIONS"),
    _get(b"/v1/completions", b"origin: https://app.example.com\r\naccess-control-request-method: POST\r\n", b"OPTIONS"),
    _get(b"/v1/files/" + MARK, method=b"DELETE"), _get(b"/openapi.json", b"expect: 100-continue\r\n"),
    _get(b"/version", b"connection: upgrade\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n"),
    _get(b"/version", b"connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-key: x\r\n"),
    _json(b"/v1/completions", _TEXT), _json(b"/v1/completions", {**_TEXT, "stream": True}),
    _json(b"/v1/completions", {**_TEXT, "stream": True}, version=b"1.0"),
    _json(b"/v1/chat/completions", {"model": "fake", "messages": [{"role": "user", "content": "x"}], "max_tokens": 3}),
    _json(b"/v1/messages", {"model": "fake", "messages": [{"role": "user", "content": "x"}], "max_tokens": 3}),
    _json(b"/tokenize", {"prompt": MARK.decode()}, b"expect: 100-continue\r\n"),
    _json(b"/tokenize", {"prompt": "x"}, b"connection: upgrade\r\nupgrade: h2c\r\n"),
    _json(b"/detokenize", {"tokens": [65, 66]}, b"origin: https://app.example.com\r\n"),
    _chunked(b"/tokenize", b'{"prompt":"' + MARK + b'"}'),
    _chunked(b"/tokenize", b'{"prompt":"x"}', b';a="' + MARK + b'"', b"x-trailer: " + MARK + b"\r\n"),
    b"POST /v1/files HTTP/1.1\r\n" + HOST + AUTH + LABEL + b"content-type: multipart/form-data; boundary=xyz\r\n"
    + b"content-length: %d\r\n\r\n" % len(_FORM) + _FORM,
]  # fmt: skip

WORDS = [
    b"\r\n", b"\r", b"\n", b"\r\n\r\n", b"\x00", b"\xff" * 9, b" ", b"\t", b":", b";", b",", b"%2f", b"%00", b"..",
    b"//", b"{[", b'"', b"1e999", b"NaN", b"0\r\n\r\n", b"ffffffff\r\n", b"FFFFFFFFFFFFFFFFF\r\n", b"-1\r\n", b"0;\r\n",
    b"content-length: 5\r\n", b"content-length: 99999999999999999999\r\n", b"content-length: -1\r\n",
    b"transfer-encoding: chunked\r\n", b"transfer-encoding: gzip, chunked\r\n", b"Transfer-Encoding : chunked\r\n",
    b"connection: close\r\n", b"connection: keep-alive, upgrade\r\n", b"upgrade: h2c\r\n", b"expect: 100-continue\r\n",
    b"host: evil.example\r\n", b"origin: http://evil.example\r\n", b"sec-fetch-site: cross-site\r\n",
    b"HTTP/1.0", b"HTTP/2.0", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"authorization: Bearer " + MARK + b"\r\n", b"content-type: text/plain\r\n", b" x: folded " + MARK + b"\r\n",
    b"x: " + b"y" * 40_000 + b"\r\n", b"x: y\r\n" * 120, b"\r\n" * 2000, b"z" * 3000,
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"CONNECT a:80 HTTP/1.1\r\n\r\n", b"TRACE / HTTP/1.1\r\n\r\n",
]  # fmt: skip

CLIENT_HELLO = base64.b64decode(
    "FgMBAP4BAAD6AwPoCyG6MBPCRKqR0jbePeIrVWa5lN9B1zyFGBSAvFxkCSBzD4LFJURLwwgbZuTrSUlrzkuJFPVvKop0af4GGNws0gAKEwITAx"
    "MBwCsA/wEAAKcAAAAOAAwAAAlsb2NhbGhvc3QACwAEAwABAgAKABYAFAAdABcAHgAZABgBAAEBAQIBAwEEACMAAAAWAAAAFwAAAA0AKgAoBAMF"
    "AwYDCAcICAgJCAoICwgECAUIBgQBBQEGAQMDAwEDAgQCBQIGAgArAAUEAwQDAwAtAAIBAQAzACYAJAAdACAP7EnGVw6NnTNoBnR+yx5PklXwSL"
    "yCVivyrVq1FLYcVw=="
)
"""The first record of a TLS handshake, always the same."""


def mutate(rng: random.Random, data: bytes) -> bytes:
    """Break `data` in one place."""
    at = rng.randrange(len(data) + 1)
    span = data[at : at + rng.choice((1, 2, 5, 20, 100))]
    match rng.randrange(9):
        case 0:
            return data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
        case 1:
            return (
                data[:at] + bytes([data[at % len(data)] ^ (1 << rng.randrange(8))]) + data[at + 1 :] if data else data
            )
        case 2:
            return data[:at] + data[at + len(span) :]
        case 3:
            return data[:at] + span * rng.choice((1, 2, 30)) + data[at:]
        case 4 | 5:
            return data[:at] + rng.choice(WORDS) + data[at:]
        case 6:  # a word where a line begins
            starts = [i + 2 for i in range(len(data) - 1) if data[i : i + 2] == b"\r\n"] or [0]
            at = rng.choice(starts)
            return data[:at] + rng.choice(WORDS) + data[at:]
        case 7:  # another number
            digits = [i for i, byte in enumerate(data) if 48 <= byte <= 57] or [0]
            at = rng.choice(digits)
            return data[:at] + b"%d" % rng.choice((0, 1, 7, 255, 4096, 2**31, 2**63, 2**64)) + data[at + 1 :]
        case _:
            return data[:at]


@dataclasses.dataclass
class Case:
    """One connection: what is sent in which pieces, and how it ends."""

    number: int
    secure: str
    """"" is HTTP; tls: HTTP inside of TLS; hello: a broken handshake; record: broken records behind a good one."""
    pieces: list[bytes]
    pause_s: float
    end: str

    @property
    def data(self) -> bytes:
        """Everything that is sent."""
        return b"".join(self.pieces)


def case_of(seed: int, number: int) -> Case:
    """The case of this number, the same in every run of `seed`."""
    rng = random.Random(f"{seed}:{number}")
    secure = rng.choice(("", "", "", "", "", "tls", "tls", "hello", "record"))
    if secure == "hello":
        data = CLIENT_HELLO
        for _ in range(rng.randint(1, 4)):
            data = mutate(rng, data)
    else:
        data = b"".join(rng.choice(SAMPLES) for _ in range(rng.choice((1, 1, 1, 2, 5))))
        data *= rng.choice((1, 1, 1, 1, 1, 1, 1, 1, 1, 3, 3, 40, 40, 400))
        for _ in range(rng.choice((0, 1, 1, 2, 3, 6))):
            data = mutate(rng, data)
    n_cuts = rng.choice((0, 0, 1, 3, 20))
    cuts = sorted(rng.randrange(len(data) + 1) for _ in range(n_cuts))
    pieces = [data[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    end = rng.choice(("half-close", "half-close", "half-close", "read", "close", "reset"))
    return Case(number, secure, pieces, rng.choice((0.0, 0.0, 0.002)), end)


def deliver(case: Case, port: int, context: ssl.SSLContext) -> bytes:
    """Send a case; what comes back until the end, or for a moment where the client goes on waiting."""
    raw = socket.create_connection(("127.0.0.1", port), timeout=60)
    connection: socket.socket = raw
    try:
        if case.secure in ("tls", "record"):
            connection = context.wrap_socket(raw, server_hostname="localhost")
        if case.secure == "record":
            connection.sendall(SAMPLES[0])
            raw = socket.socket(fileno=connection.detach())
            connection = raw
        with contextlib.suppress(OSError):
            for piece in case.pieces:
                connection.sendall(piece)
                time.sleep(case.pause_s)
        return _end(case, connection)
    finally:
        connection.close()


def _end(case: Case, connection: socket.socket) -> bytes:
    with contextlib.suppress(OSError):
        if case.end == "reset":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        elif case.end == "half-close":
            socket.socket.shutdown(connection, socket.SHUT_WR)  # of TCP: SSLSocket's would forget the keys
    if case.end in ("reset", "close"):
        return b""
    received = []
    connection.settimeout(10 if case.end == "half-close" else 0.2)
    with contextlib.suppress(OSError):
        while piece := connection.recv(65536):
            received.append(piece)
    return b"".join(received)
