"""Raw HTTP and TLS, broken in every way: the server stays whole, small, quiet, and answers others with the same bytes.

FUZZ_CASES and FUZZ_SEED say how many cases and which; FUZZ_FIRST begins with a case that failed.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import os
import re
import shutil
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from http_fuzz import AUTH, KEY, MARK, Case, case_of, deliver
from serve_fakes import reply_to

from quire.serve.http.ignored import MAX_LOGGED, MAX_NAME_CHARS

if shutil.which("openssl") is None:
    pytest.skip("needs openssl to make a certificate", allow_module_level=True)

N_CASES = int(os.environ.get("FUZZ_CASES", "400"))
SEED = int(os.environ.get("FUZZ_SEED", "1"))
FIRST = int(os.environ.get("FUZZ_FIRST", "0"))
BUNCH = 50
N_AT_ONCE = 8
STATUSES = {100, 200, 204, 304, 400, 401, 403, 404, 405, 408, 413, 415, 421, 431}
MAX_LINE_CHARS = 300
ACCESS_LINE = re.compile(
    r"\S+ \S+ INFO quire.access: [A-Z-]{1,20} \S+ \d{3} [0-9.]+ s req_[0-9a-f]{24}(, client left)?"
)
IGNORED_LINE = re.compile(
    rf"\S+ \S+ WARNING quire.serve: the request field [!-~]{{1,{MAX_NAME_CHARS + 1}}} is ignored"
    r"( \(did you mean [\w.]+\?\))? \(said once; X-Ignored-Params lists them, --strict refuses them\)"
)
MAX_GROWTH_MIB = 24
"""Allocators and caches fill in the first bunches: growth is measured from the fourth one on."""


class Target:
    """The server process under test."""

    def __init__(self, folder: Path) -> None:
        cert, key = folder / "cert.pem", folder / "key.pem"
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
             "-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1",
             "-keyout", str(key), "-out", str(cert)], check=True, capture_output=True,
        )  # fmt: skip
        self.log_path = folder / "log"
        with self.log_path.open("wb") as log:
            program = Path(__file__).with_name("fuzz_target.py")
            self.process = subprocess.Popen(
                [sys.executable, *map(str, (program, KEY, cert, key, folder))],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
            )  # fmt: skip
        assert self.process.stdout is not None
        self.ports = [int(port) for port in self.process.stdout.readline().split()]
        self.context = ssl.create_default_context(cafile=str(cert))
        self._seen = psutil.Process(self.process.pid)
        bases = [f"http://127.0.0.1:{self.ports[0]}", f"https://127.0.0.1:{self.ports[1]}"]
        headers = {"authorization": f"Bearer {KEY}"}
        self.clients = [httpx.Client(base_url=base, headers=headers, verify=self.context, timeout=60) for base in bases]

    def run(self, case: Case) -> None:
        """Deliver a case and judge the answers."""
        reply = deliver(case, self.ports[case.secure != ""], self.context)
        if case.secure == "record":
            return
        statuses = {int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", reply)}
        assert statuses <= STATUSES, f"seed {SEED}, case {case.number}: {statuses - STATUSES}\n{case}\n{reply[-500:]!r}"
        assert not reply or reply.startswith(b"HTTP/1.1 ") or case.secure == "hello", (
            f"case {case.number}: {reply[:99]!r}"
        )

    def canary(self) -> bytes:
        """The bytes of a known answer, from both servers, when nothing runs any more."""
        answers = []
        for client in self.clients:
            body = {"model": "fake", "prompt": [5, 6], "max_tokens": 30}
            answer = client.post("/v1/completions", json=body).json()
            answers.append(answer["choices"][0]["text"])
            assert client.get("/health").json() == {"status": "ok"}
        assert answers == [reply_to([5, 6])[:30]] * 2
        return answers[0].encode()

    def is_idle(self) -> bool:
        """Nothing runs, and no connection is left but those of the canaries."""
        text = self.clients[0].get("/metrics").text + self.clients[1].get("/metrics").text
        running = re.findall(r"quire:(?:http_requests_live|num_requests_running){.*} (\S+)", text)
        established = [each for each in self._seen.net_connections("tcp") if each.raddr]
        return len(running) == 4 and all(float(n) == 0 for n in running) and len(established) <= len(self.clients)

    def memory_mib(self) -> float:
        """Resident."""
        return float(self._seen.memory_info().rss / 2**20)

    def end(self) -> str:
        """Stop it; returns its log."""
        for client in self.clients:
            client.close()
        assert self.process.poll() is None, "it has died"
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert self.process.wait(30) == 0
        return self.log_path.read_text()


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Target]:
    made = Target(tmp_path)
    yield made
    made.process.kill()
    made.process.wait()


def wait_for(condition: Any, seconds: float = 60.0) -> None:
    deadline_s = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline_s, "connections or requests are stuck"
        time.sleep(0.05)


@pytest.mark.timeout(3600)
def test_broken_http_and_tls(target: Target) -> None:
    golden, memory_mib = target.canary(), []
    numbers = iter(range(FIRST, FIRST + N_CASES))
    with concurrent.futures.ThreadPoolExecutor(N_AT_ONCE) as pool:
        while bunch := list(itertools.islice(numbers, BUNCH)):
            for done in [pool.submit(target.run, case_of(SEED, number)) for number in bunch]:
                done.result()
            assert target.process.poll() is None, f"it died in the cases {bunch[0]} to {bunch[-1]} of seed {SEED}"
            assert target.canary() == golden
            memory_mib.append(target.memory_mib())
    wait_for(target.is_idle)
    text = target.end()
    some = ", ".join(f"{mib:.1f}" for mib in memory_mib[:: max(1, len(memory_mib) // 10)])
    n_lines = text.count("\n")
    print(f"{N_CASES} cases of seed {SEED}: memory {some} MiB, log {len(text)} bytes in {n_lines} lines")
    assert memory_mib[-1] - memory_mib[min(3, len(memory_mib) - 1)] < MAX_GROWTH_MIB, memory_mib
    check_log(text)


def check_log(text: str) -> None:
    """Access lines, a few names of ignored fields, nothing else: no text or key of a client, no traceback."""
    assert MARK.decode() not in text and KEY not in text, text[:2000]
    n_ignored = 0
    for line in text.splitlines():
        assert len(line) <= MAX_LINE_CHARS, line[:500]
        ignored = IGNORED_LINE.fullmatch(line)
        assert ignored or ACCESS_LINE.fullmatch(line), line
        n_ignored += ignored is not None
    assert n_ignored <= MAX_LOGGED


def test_the_fuzz_says_something() -> None:
    """Cases are the same in each run, of every kind, and a good share is still HTTP."""
    cases = [case_of(SEED, number) for number in range(300)]
    assert cases == [case_of(SEED, number) for number in range(300)]
    assert {case.secure for case in cases} == {"", "tls", "hello", "record"}
    assert {case.end for case in cases} == {"half-close", "read", "close", "reset"}
    assert len({case.data for case in cases}) > 280 and sum(AUTH in case.data for case in cases) > 150
    with pytest.raises(AssertionError):
        check_log(f"2026-01-01 00:00:00,000 INFO quire.access: GET /x 200 0.1 s req_{'0' * 24} {MARK.decode()}\n")
