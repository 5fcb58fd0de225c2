"""Faults of ranks under a server's feet, counted: `python benchmarks/rank_faults.py --times 20`.

Starts `quire serve` with several ranks on the CPU and the demo model. Each time requests run and one rank is killed
(SIGKILL), stopped (SIGSTOP) or out of memory (a signal raises MemoryError wherever it is); or the engine's process is
killed, with a rank stopped. Prints when /health turned red and green again, what became of the requests,
and which processes are left in the end.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

import psutil

RANK = "quire.engine.ranks.process"
ENGINE = "quire.engine.process"
N_REQUESTS = 4
LONGEST_S = 120.0
INJECTION = """
import signal, sys
def fail(*_):
    raise MemoryError("injected")
if "RANK" in sys.orig_argv:
    signal.signal(signal.SIGUSR2, fail)
""".replace("RANK", RANK)
FAULTS = ("kill", "stop", "memory", "engine")


class Server:
    """One `quire serve`."""

    def __init__(self, n_ranks: int, n_stages: int, log: pathlib.Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        command = [
            sys.executable, "-c", "import sys; from quire.cli.main import main; sys.exit(main())", "serve", "--device",
            "cpu", "--tensor-parallel-size", str(n_ranks), "--pipeline-parallel-size", str(n_stages),
            "--max-model-len", "1024", "--port", str(self.port), "--max-engine-restarts", "100",
            "--max-num-batched-tokens", "512",
        ]  # fmt: skip
        self._folder = tempfile.TemporaryDirectory()
        (pathlib.Path(self._folder.name) / "sitecustomize.py").write_text(INJECTION)
        path = os.pathsep.join((self._folder.name, os.environ.get("PYTHONPATH", "")))
        with log.open("w") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=file, env={**os.environ, "PYTHONPATH": path})

    def ask(self, path: str, body: object = None, limit_s: float = LONGEST_S) -> int:
        """Status of the answer; 0: none came."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data=data, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=limit_s) as answer:
                answer.read()
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0

    def wait(self, healthy: bool) -> float:
        """Seconds until /health says so."""
        start_s = time.monotonic()
        while (self.ask("/health", limit_s=2) == 200) != healthy:
            if time.monotonic() - start_s > LONGEST_S or self.process.poll() is not None:
                raise SystemExit(f"/health did not turn {'green' if healthy else 'red'}: see the log")
            time.sleep(0.05)
        return time.monotonic() - start_s

    def processes(self, name: str) -> list[psutil.Process]:
        """Below the server, with this module."""
        return [each for each in psutil.Process(self.process.pid).children(recursive=True) if name in each.cmdline()]


def strike(server: Server, fault: str, number: int) -> None:
    """The rank that suffers changes."""
    ranks = server.processes(RANK)
    pid = ranks[number % len(ranks)].pid
    match fault:
        case "kill":
            os.kill(pid, signal.SIGKILL)
        case "stop":
            os.kill(pid, signal.SIGSTOP)
        case "memory":
            os.kill(pid, signal.SIGUSR2)
        case "engine":
            os.kill(pid, signal.SIGSTOP)
            os.kill(server.processes(ENGINE)[0].pid, signal.SIGKILL)


def once(server: Server, fault: str, number: int) -> tuple[float, float, list[int]]:
    """(seconds until red, seconds from there to green, statuses of the requests)."""
    words = " ".join(f"w{number}{i}" for i in range(100))  # nothing of it is cached
    bodies = [{"model": "demo", "prompt": f"{i} {words}", "max_tokens": 60} for i in range(N_REQUESTS)]
    before = [each.pid for each in server.processes(RANK)]
    with concurrent.futures.ThreadPoolExecutor(N_REQUESTS) as pool:
        asked = [pool.submit(server.ask, "/v1/completions", body) for body in bodies]
        time.sleep(0.2)
        strike(server, fault, number)
        red_s = server.wait(healthy=False)
        green_s = server.wait(healthy=True)
        statuses = [each.result() for each in asked]
    left = [pid for pid in before if psutil.pid_exists(pid)]
    if left:
        raise SystemExit(f"ranks {left} are left of the engine before")
    return red_s, green_s, statuses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=2, help="of each stage")
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--log", type=pathlib.Path, default=pathlib.Path("rank_faults.log"))
    options = parser.parse_args()
    server = Server(options.ranks, options.stages, options.log)
    try:
        print(f"up after {server.wait(healthy=True):.1f} s", flush=True)
        for fault in options.faults:
            red, green, statuses = list[float](), list[float](), collections.Counter[int]()
            for number in range(options.times):
                red_s, green_s, found = once(server, fault, number)
                red.append(red_s)
                green.append(green_s)
                statuses.update(found)
            print(
                f"{fault}: {len(red)} times; red after {min(red):.2f} to {max(red):.2f} s, green {min(green):.1f} to"
                f" {max(green):.1f} s later; {N_REQUESTS * len(red)} requests in, out: {dict(statuses)}", flush=True,
            )  # fmt: skip
        below = psutil.Process(server.process.pid).children(recursive=True)
        server.process.send_signal(signal.SIGINT)
        code = server.process.wait(30)
        time.sleep(0.5)
        left = [each.pid for each in below if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]
        print(f"Ctrl-C: exit status {code}, processes left: {left}", flush=True)
    finally:
        server.process.kill()


if __name__ == "__main__":
    main()
