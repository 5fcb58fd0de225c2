"""`quire serve` with its real processes over the engine of `tests/cpu/engine/faulty_engine.py`, which needs no torch
and is there in half a second: `python light_server.py FLAGS`, and `Light`, which starts it.

In every process SIGUSR2 makes the main thread, and so the event loop, stand still in `stand_still`.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import psutil

ROOT = pathlib.Path(__file__).resolve().parents[3]
ENGINE = ROOT / "tests" / "cpu" / "engine" / "faulty_engine.py"
FLAGS = ("--device", "null", "--disable-log-stats")
SITE = """
import signal, time
def stand_still(*_):
    time.sleep(1000)
signal.signal(signal.SIGUSR2, stand_still)
"""
BODY = {"model": "demo", "prompt": [5, 7], "max_tokens": 8, "ignore_eos": True, "seed": 1}
PATH = "/v1/completions"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(condition: Callable[[], Any], limit_s: float = 90) -> Any:
    """The first true value of `condition`; generous, as the machine may be busy."""
    end_s = time.monotonic() + limit_s
    while not (found := condition()):
        assert time.monotonic() < end_s, "it did not come about"
        time.sleep(0.05)
    return found


class Light:
    """One server. Its stderr is in `log`, unless `stderr` says otherwise."""

    def __init__(self, folder: pathlib.Path, *flags: str, site: str = "", **options: Any) -> None:
        """site: more Python for every process before anything else. options: for Popen."""
        (folder / "sitecustomize.py").write_text(SITE + site)
        self.log_path = folder / "log"
        self.port = free_port()
        self.base = f"http://127.0.0.1:{self.port}"
        command = [sys.executable, str(pathlib.Path(__file__)), "--port", str(self.port), *FLAGS, *flags]
        environment = os.environ | {"PYTHONPATH": f"{folder}:{ROOT}"} | options.pop("environment", {})
        with open(self.log_path, "ab") as log:
            options = {"stdout": log, "stderr": log, "start_new_session": True} | options
            self.process = subprocess.Popen(command, cwd=folder, env=environment, **options)

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def wait_ready(self) -> Light:
        """Until so many connections in a row are served that no process can have been left out."""

        def is_ready() -> bool:
            assert self.process.poll() is None, self.log
            with contextlib.suppress(httpx.TransportError):
                return all(httpx.get(self.base + "/health", timeout=30).status_code == 200 for _ in range(12))
            return False

        wait_for(is_ready)
        return self

    def canary(self) -> str:
        """The text of a known request; each connection may reach another process."""
        answer = httpx.post(self.base + PATH, json=BODY, timeout=60)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    def children(self, part: str) -> list[psutil.Process]:
        found = []
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                if any(part in word for word in child.cmdline()):
                    found.append(child)
        return sorted(found, key=lambda child: child.pid)

    def api_processes(self) -> list[psutil.Process]:
        return self.children("quire.serve.api_process")

    def wait_processes(self, n: int) -> list[psutil.Process]:
        """All `n` of them answer on a connection of their own."""

        def all_listen() -> list[psutil.Process]:
            found = self.api_processes()
            ready = [one for one in found if any(c.status == "LISTEN" for c in one.net_connections("tcp"))]
            return ready if len(ready) == n else []

        return list(wait_for(all_listen))

    def processes(self) -> list[psutil.Process]:
        """The server and all its children."""
        own = psutil.Process(self.process.pid)
        return [own, *own.children()]

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(60)


@contextlib.contextmanager
def light(folder: pathlib.Path, *flags: str, **options: Any) -> Iterator[Light]:
    server = Light(folder, *flags, **options)
    try:
        yield server
    finally:
        server.stop()


def main() -> int:
    from quire.cli import serve
    from quire.cli.model import engine_config
    from quire.config.flags import FlagParser, read_flags
    from quire.serve.config import ServerConfig
    from quire.serve.server import run

    parser = FlagParser(prog="quire serve")
    serve.configure(parser)
    namespace = parser.parse_args()
    return run(engine_config(namespace), read_flags(namespace, ServerConfig), (str(ENGINE),))


if __name__ == "__main__":
    sys.exit(main())
