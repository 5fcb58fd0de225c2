"""HTTPS: handshakes that do not end, silence behind them, records that are none, with a certificate of the test."""

from __future__ import annotations

import contextlib
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from live_server import LiveServer, read_all
from serve_fakes import reply_to
from test_serve_live import Process

from quire.serve.http import listener

PATH = "/v1/completions"
BODY = {"model": "fake", "prompt": [5, 6], "max_tokens": 30}
GET = b"GET /version HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"

if shutil.which("openssl") is None:
    pytest.skip("needs openssl to make a certificate", allow_module_level=True)


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Options of a server with a fresh certificate for localhost."""
    folder: Path = tmp_path_factory.mktemp("tls")
    key, cert = folder / "key.pem", folder / "cert.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1",
         "-keyout", str(key), "-out", str(cert)], check=True, capture_output=True,
    )  # fmt: skip
    return {"ssl_certfile": str(cert), "ssl_keyfile": str(key)}


@pytest.fixture
def serve(make_server: Any, certificate: dict[str, str], caplog: pytest.LogCaptureFixture) -> Iterator[Any]:
    """Starts HTTPS servers; afterwards each serves as before, holds nothing, and the log is empty."""
    servers: list[LiveServer] = []

    def start(**options: Any) -> LiveServer:
        servers.append(make_server(**certificate, **options))
        return servers[-1]

    yield start
    for server in servers:
        canary(server)
        wait_for(lambda server=server: not connections(server) and not handshakes(server))
    assert not caplog.records, caplog.records[:3]


def context_of(server: LiveServer) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=server.config.ssl_certfile)


def secured(server: LiveServer) -> ssl.SSLSocket:
    return context_of(server).wrap_socket(server.connect(), server_hostname="localhost")


def canary(server: LiveServer) -> None:
    answer = httpx.post(server.base + PATH, json=BODY, verify=context_of(server), timeout=60)
    assert answer.status_code == 200 and answer.json()["choices"][0]["text"] == reply_to([5, 6])[:30]


def connections(server: LiveServer) -> list[Any]:
    return list(server._http.server_state.connections)


def handshakes(server: LiveServer) -> list[Any]:
    return [task for each in getattr(server._http, "servers", []) for task in list(each.handshakes)]


def wait_for(condition: Callable[[], Any], seconds: float = 60.0) -> None:
    deadline_s = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen in time"
        time.sleep(0.01)


def test_https_serves(serve: Any) -> None:
    server = serve(write_timeout=5.0)
    with secured(server) as connection:
        connection.sendall(GET.replace(b"connection: close\r\n", b"") * 200 + GET)
        assert read_all(connection).count(b"HTTP/1.1 200 ") == 201
    with httpx.Client(base_url=server.base, verify=context_of(server)) as http:
        page = {"origin": server.base}
        assert http.post(PATH, json=BODY, headers=page).status_code == 200, "the scheme is part of an origin"
        assert http.post(PATH, json=BODY, headers={"origin": server.base.replace("https", "http")}).status_code == 403
        with http.stream("POST", PATH, json={**BODY, "stream": True}) as streamed:
            assert streamed.read().endswith(b"data: [DONE]\n\n")
        assert http.post("/tokenize", json={"prompt": "x" * 4000}).json()["count"] == 4000


def test_a_handshake_that_does_not_end_is_ended(serve: Any) -> None:
    """Silence, half of a first record, and a client that has said hello and then says nothing."""
    server = serve(header_timeout=0.5)
    with server.connect() as silent, server.connect() as half, server.connect() as said:
        half.sendall(b"\x16\x03\x01\x02\x00\x01")
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        hello = context_of(server).wrap_bio(incoming, outgoing, server_hostname="localhost")
        with contextlib.suppress(ssl.SSLWantReadError):
            hello.do_handshake()
        said.sendall(outgoing.read())
        wait_for(lambda: len(handshakes(server)) == 3)
        canary(server)
        for connection in (silent, half, said):
            connection.settimeout(20)
            read_all(connection)
        wait_for(lambda: not handshakes(server))
    assert not connections(server)


@pytest.mark.parametrize("sent", [b"", b"GET /ver", b"\r\n"])
def test_silence_behind_a_handshake_is_ended(serve: Any, sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for a client that does not confirm the end of TLS."""
    monkeypatch.setattr(listener, "TLS_CLOSE_S", 0.3)
    server = serve(header_timeout=0.5)
    with secured(server) as connection:
        connection.sendall(sent)
        wait_for(lambda: connections(server))
        wait_for(lambda: not connections(server))
        assert read_all(connection).startswith(b"HTTP/1.1 408 ")


def test_an_idle_connection_is_closed(serve: Any) -> None:
    server = serve(keep_alive_timeout=0.3, header_timeout=60.0)
    with secured(server) as connection:
        connection.sendall(GET.replace(b"connection: close\r\n", b""))
        assert read_all(connection).count(b"HTTP/1.1") == 1


def test_open_handshakes_push_out_each_other(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the limit the oldest goes, so that an honest client is served while a flood lasts."""
    monkeypatch.setattr(listener, "MAX_HANDSHAKES", 50)
    server = serve(header_timeout=60.0)
    silent: list[socket.socket] = []
    try:
        for number in range(200):
            silent.append(server.connect())
            if number % 50 == 49:
                canary(server)
                assert len(handshakes(server)) <= 50
        wait_for(lambda: 45 <= len(handshakes(server)) <= 50)  # canaries have pushed out one or two
        silent[0].settimeout(20)
        assert read_all(silent[0]) == b"", "the oldest was closed"
    finally:
        for connection in silent:
            connection.close()


def test_a_reader_that_stops_is_cut_off(serve: Any) -> None:
    server = serve(write_timeout=0.4)
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.connect(("127.0.0.1", server.port))
    with context_of(server).wrap_socket(raw, server_hostname="localhost") as connection:
        connection.sendall(GET.replace(b"/version", b"/openapi.json").replace(b"connection: close\r\n", b"") * 400)
        wait_for(lambda: connections(server))
        wait_for(lambda: not connections(server) and not server._http.server_state.tasks)


@pytest.mark.parametrize(
    "record", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\xff\xff" + bytes(100), b"\x15\x03\x01\x00\x02\x02\x28",
               b"\x80\x2e\x01\x00\x02", b"\x17\x03\x03\x00\x10" + bytes(16), b"\xff" * 70_000],
)  # fmt: skip
def test_records_that_are_none(serve: Any, record: bytes) -> None:
    """In place of the handshake, and behind it."""
    server = serve(header_timeout=5.0)
    with server.connect() as connection:
        with contextlib.suppress(OSError):
            connection.sendall(record)
            connection.shutdown(socket.SHUT_WR)
        read_all(connection)
    if record:
        with secured(server) as connection, socket.socket(fileno=connection.fileno()) as raw:
            with contextlib.suppress(OSError):
                raw.sendall(record)
            with contextlib.suppress(OSError):
                assert not connection.recv(100).startswith(b"HTTP/1.1 2")
            raw.detach()


def test_closing_ends_handshakes(make_server: Any, certificate: dict[str, str]) -> None:
    server = make_server(**certificate, header_timeout=60.0)
    with server.connect() as connection:
        wait_for(lambda: handshakes(server))
        server._http.should_exit = True
        assert read_all(connection) == b""


def test_several_processes_serve_https(certificate: dict[str, str]) -> None:
    """One that is started again too, whose socket listens only when it can serve."""
    flags = [word for name, value in certificate.items() for word in ("--" + name.replace("_", "-"), value)]
    process = Process("--api-processes", "2", *flags)
    context = ssl.create_default_context(cafile=certificate["ssl_certfile"])
    base = process.base.replace("http", "https")

    def is_ready() -> bool:
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(base + "/health", verify=context, timeout=60).status_code == 200
        return False

    def listening() -> set[int]:
        found = set()
        for child in psutil.Process(process.process.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):  # a zombie is none
                is_api_process = any("quire.serve.api_process" in word for word in child.cmdline())
                if is_api_process and any(each.status == psutil.CONN_LISTEN for each in child.net_connections("tcp")):
                    found.add(child.pid)
        return found

    try:
        wait_for(is_ready, 120)
        wait_for(lambda: len(listening()) == 2, 120)
        before = listening()
        psutil.Process(min(before)).kill()
        wait_for(lambda: len(listening()) == 2 and listening() != before, 120)
        body = {"model": "demo", "prompt": "x", "max_tokens": 4, "temperature": 0}
        texts = {
            httpx.post(base + PATH, json=body, verify=context, timeout=60).json()["choices"][0]["text"]
            for _ in range(16)
        }
        assert len(texts) == 1
        process.process.terminate()
        assert process.wait(60) == 0
        assert "Traceback" not in process.output()
    finally:
        process.stop()
