"""A server process for a benchmark: started, waited for until it is healthy, and stopped whatever happens."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence

from quire.core.errors import EngineError

POLL_S = 0.02
STOP_S = 15.0
LOG_CHARS = 2000


@dataclasses.dataclass(frozen=True, slots=True)
class Server:
    """A healthy server."""

    base_url: str
    process: subprocess.Popen[bytes]


def free_port() -> int:
    """A TCP port that nobody listens on now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextlib.contextmanager
def served(command: Sequence[str], log: pathlib.Path, limit_s: float) -> Iterator[Server]:
    """Run a `... --port N ...` command, its output in `log`; yields once /health says yes.

    Raises EngineError with the end of the log if it ends before, or is not healthy within `limit_s`.
    """
    base_url = f"http://127.0.0.1:{command[command.index('--port') + 1]}"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            _wait(process, base_url, log, limit_s)
            yield Server(base_url, process)
        finally:
            _stop(process)


def _wait(process: subprocess.Popen[bytes], base_url: str, log: pathlib.Path, limit_s: float) -> None:
    deadline_s = time.monotonic() + limit_s
    while not _is_healthy(base_url):
        code = process.poll()
        if code is not None or time.monotonic() > deadline_s:
            what = f"was not healthy within {limit_s:g} s" if code is None else f"ended with {code}"
            raise EngineError(f"the server {what}: {log.read_text(errors='replace')[-LOG_CHARS:]}")
        time.sleep(POLL_S)


def _is_healthy(base_url: str) -> bool:
    try:
        return bool(urllib.request.urlopen(f"{base_url}/health", timeout=1).status == 200)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    """SIGINT; a second one, which cuts the drain short; then by force. Its engine ends with it."""
    for number in (signal.SIGINT, signal.SIGINT, signal.SIGKILL):
        process.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S / 2)
            return
    process.wait()
