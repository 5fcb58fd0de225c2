"""Faults of ranks under a server's feet, counted: `python -m benchmarks.rank_faults --times 20`.

    python -m benchmarks.rank_faults --device cuda --servers 4     # four servers share the GPUs, and the faults

Starts `quire serve` with several ranks and the demo model. Each time requests run, half of them streamed,
and one rank is killed (SIGKILL), stopped (SIGSTOP), out of memory (a signal raises MemoryError wherever it is) or hangs
(a signal's handler never returns); or the engine's process is killed, with a rank stopped. Records when /health turned
red and green again, when the log named the rank, whether the stack of one that hangs, is stopped or lacks memory is
there, what became of the requests, and what is left of the engine before: processes, folders with their sockets, at
the end shared memory and memory of GPUs. Exit code 1 where a fault is seen late, a stack is not there, a request gets
no end, or anything is left. Needs psutil.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import contextlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any, Final

import psutil

from benchmarks.served import free_port
from quire.bench.report import build_report, write_report

RESULTS: Final = pathlib.Path(__file__).with_name("results")
RANK: Final = "quire.engine.ranks.process"
ENGINE: Final = "quire.engine.process"
SHARED: Final = pathlib.Path("/dev/shm")
N_REQUESTS: Final = 4
N_TOKENS: Final = {"cpu": 60, "cuda": 1200}
"""Of a request: it is not to end before the fault comes."""
SEEN_S: Final = 10.0
"""No fault may stay unseen for longer."""
RED_S: Final = 4.0
"""Nor may /health be green for longer, whatever is still hoped for: a rank is late after 2 s."""
LONGEST_S: Final = 120.0
GPU_MIB: Final = 64
"""A GPU's own use of memory moves by less."""
HANGING: Final = "hang_for_good"
INJECTION: Final = """
import signal, sys, time
def fail(*_):
    raise MemoryError("injected")
def NAME(*_):
    while True:
        time.sleep(0.05)
if "RANK" in sys.orig_argv:
    signal.signal(signal.SIGUSR2, fail)
    signal.signal(signal.SIGRTMIN, NAME)
""".replace("RANK", RANK).replace("NAME", HANGING)
NAMED: Final = {
    "kill": r"rank {rank} \(process {pid}\) ended with SIGKILL",
    "stop": r"rank {rank} \(process {pid}\), stopped by a signal, made no progress",
    "memory": r"rank {rank} ran out of memory",
    "hang": r"rank {rank} \(process {pid}\) made no progress",
    "engine": r"the engine process ended with SIGKILL",
}
"""What the log says of each fault."""
STACKS: Final = {
    "stop": r"the stacks of rank {rank} follow.*in run_rank",
    "memory": r"rank {rank} ends.*in run_rank.*MemoryError: injected",
    "hang": rf"the stacks of rank {{rank}} follow.*{HANGING}",
}
"""How a rank's stack stands in the log; one that is killed leaves none."""
FAULTS: Final = tuple(NAMED)
WRITING: Final = threading.Lock()
"""Held while what there is by now is written: a run that is cut off leaves that."""


class Server:
    """One `quire serve` in a folder of its own for all temporary files."""

    def __init__(self, options: list[str], folder: pathlib.Path, log: pathlib.Path, device: str = "cpu") -> None:
        self.folder, self.log, self.port, self.n_tokens = folder / "tmp", log, free_port(), N_TOKENS[device]
        self.folder.mkdir(parents=True)
        (folder / "sitecustomize.py").write_text(INJECTION)
        command = [
            sys.executable, "-c", "import sys; from quire.cli.main import main; sys.exit(main())", "serve", "--device",
            device, "--max-model-len", "2048", "--port", str(self.port), "--max-engine-restarts", "100",
            "--max-num-batched-tokens", "512", "--max-num-seqs", "16", *options,
        ]  # fmt: skip
        path = os.pathsep.join((str(folder), os.environ.get("PYTHONPATH", "")))
        own = {**os.environ, "PYTHONPATH": path, "TMPDIR": str(self.folder)}
        with log.open("w") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=file, env=own)

    @contextlib.contextmanager
    def _opened(self, path: str, body: object, limit_s: float) -> Iterator[Any]:
        data = None if body is None else json.dumps(body).encode()
        url, headers = f"http://127.0.0.1:{self.port}{path}", {"content-type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(url, data=data, headers=headers), timeout=limit_s) as answer:
            yield answer

    def is_healthy(self) -> bool:
        """As it says itself."""
        try:
            with self._opened("/health", None, 2) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def ask(self, body: dict[str, Any]) -> str:
        """What became of a request."""
        kind = "stream" if body.get("stream") else "whole"
        try:
            with self._opened("/v1/completions", body, LONGEST_S) as answer:
                data = answer.read().decode()
        except urllib.error.HTTPError as error:
            return f"{kind}: error {json.loads(error.read())['error']['code']}"
        except OSError as error:
            return f"{kind}: cut off ({type(error).__name__})"
        if kind == "whole":
            n_tokens = json.loads(data)["usage"]["completion_tokens"]
            return "whole: answered" if n_tokens == body["max_tokens"] else f"whole: {n_tokens} tokens"
        found = re.search(r'"error":.*?"code": ?"(\w+)"', data)
        if found:
            return f"stream: event {found[1]}"
        return "stream: answered" if data.rstrip().endswith("[DONE]") else "stream: cut off"

    def wait(self, healthy: bool) -> float:
        """Seconds until /health says so."""
        start_s = time.monotonic()
        while self.is_healthy() != healthy:
            if time.monotonic() - start_s > LONGEST_S or self.process.poll() is not None:
                raise SystemExit(f"/health did not turn {'green' if healthy else 'red'}: see {self.log}")
            time.sleep(0.02)
        return time.monotonic() - start_s

    def processes(self, name: str) -> list[psutil.Process]:
        """Below the server, with this module, oldest first."""
        found = []
        for each in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if name in each.cmdline():
                    found.append(each)
        return sorted(found, key=lambda each: each.pid)


def strike(server: Server, fault: str, pid: int) -> None:
    """Do it to a rank, or the engine above it."""
    numbers = {
        "kill": signal.SIGKILL, "stop": signal.SIGSTOP, "memory": signal.SIGUSR2, "hang": signal.SIGRTMIN,
        "engine": signal.SIGSTOP,
    }  # fmt: skip
    engine = server.processes(ENGINE)[0].pid
    os.kill(pid, numbers[fault])
    if fault == "engine":
        os.kill(engine, signal.SIGKILL)


def named_after(log: pathlib.Path, at: int, pattern: str, limit_s: float) -> float | None:
    """Seconds until the log says so, from a place in it on; None: it does not."""
    start_s = time.monotonic()
    while time.monotonic() - start_s < limit_s:
        if re.search(pattern, log.read_bytes()[at:].decode(errors="replace")):
            return time.monotonic() - start_s
        time.sleep(0.02)
    return None


def once(server: Server, fault: str, number: int) -> dict[str, Any]:
    """One fault under load. The rank that suffers changes."""
    words = " ".join(f"{fault}{number}{i}" for i in range(100))  # nothing of it is cached, or known from a death before
    shared = {"model": "demo", "max_tokens": server.n_tokens, "ignore_eos": True}
    bodies = [{**shared, "prompt": f"{i} {words}", "stream": i % 2 == 1} for i in range(N_REQUESTS)]
    ranks = server.processes(RANK)
    place, before = number % len(ranks), [*ranks, *server.processes(ENGINE)]
    at = server.log.stat().st_size
    with concurrent.futures.ThreadPoolExecutor(N_REQUESTS + 1) as pool:
        asked = [pool.submit(server.ask, body) for body in bodies]
        time.sleep(0.2 + 0.05 * (number % 5))
        pattern = NAMED[fault].format(rank=place + 1, pid=ranks[place].pid)
        strike(server, fault, ranks[place].pid)
        naming = pool.submit(named_after, server.log, at, pattern, 2 * SEEN_S)
        red_s = server.wait(healthy=False)
        green_s = server.wait(healthy=True)
        ends = collections.Counter(each.result() for each in asked)
        named_s = naming.result()
    said = server.log.read_bytes()[at:].decode(errors="replace")
    return {
        "fault": fault, "rank": place + 1, "red_s": red_s, "named_s": named_s, "green_s": green_s,
        "has_stack": has_stack(fault, place + 1, said), "ends": dict(sorted(ends.items())),
        "left": left_of(server, before),
    }  # fmt: skip


def has_stack(fault: str, rank: int, said: str) -> bool | None:
    """Whether the log has it; None where there can be none."""
    pattern = STACKS.get(fault)
    return None if pattern is None else re.search(pattern.format(rank=rank), said, re.DOTALL) is not None


def left_of(server: Server, before: list[psutil.Process]) -> list[str]:
    """What is left of an engine that is no more, while the next one runs."""
    found = [f"process {each.pid}" for each in before if is_there(each)]
    extra = sorted(path.name for path in server.folder.glob("**/quire-ranks-*"))
    return found + ([f"folders {extra}"] if len(extra) > 1 else [])


def is_there(process: psutil.Process) -> bool:
    """Whether it runs, in whatever state but dead."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def at_the_end(server: Server) -> tuple[int, list[str]]:
    """(exit status of Ctrl-C, what is left then)."""
    below = psutil.Process(server.process.pid).children(recursive=True)
    server.process.send_signal(signal.SIGINT)
    code = server.process.wait(30)
    time.sleep(0.5)
    found = [f"process {each.pid}" for each in below if is_there(each)]
    return code, found + [f"file {path.name}" for path in server.folder.glob("quire*")]


class Machine:
    """What servers may leave on it: shared memory, and memory of GPUs."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._shared, self._mib = self._names(), self._used_mib()

    def left(self) -> list[str]:
        """More than there was, once all servers have ended."""
        used = zip(self._mib, self._used_mib(), strict=True)
        found = [f"{mib - before} MiB on GPU {i}" for i, (before, mib) in enumerate(used) if mib > before + GPU_MIB]
        return found + [f"shared memory {name}" for name in self._names() - self._shared]

    def _names(self) -> set[str]:
        return {path.name for path in SHARED.iterdir()}

    def _used_mib(self) -> list[int]:
        if self._device == "cpu":
            return []
        asked = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        return [int(line) for line in subprocess.check_output(asked, text=True).split()]


def wrongs(found: dict[str, Any]) -> list[str]:
    """What must not be."""
    name = f"{found['fault']} of rank {found['rank']}"
    wrong = [f"{name}: {left} is left" for left in found["left"]]
    if found["red_s"] > RED_S or found["named_s"] is None or found["named_s"] > SEEN_S:
        wrong.append(f"{name}: red after {found['red_s']:.1f} s, named after {found['named_s']} s")
    if found["has_stack"] is False:
        wrong.append(f"{name}: its stack is not in the log")
    if sum(found["ends"].values()) != N_REQUESTS or any("cut off" in end or "tokens" in end for end in found["ends"]):
        wrong.append(f"{name}: requests ended with {found['ends']}")
    return wrong


def summary(fault: str, trials: list[dict[str, Any]]) -> str:
    """One line."""
    ends = collections.Counter[str]()
    for found in trials:
        ends.update(found["ends"])

    def span(name: str) -> str:
        values = [found[name] for found in trials if found[name] is not None]
        return f"{min(values):.2f} to {max(values):.2f} s" if values else "never"

    return (
        f"{fault}: {len(trials)} times; red after {span('red_s')}, named after {span('named_s')}, green"
        f" {span('green_s')} later; {N_REQUESTS * len(trials)} requests in, out: {dict(ends)}"
    )


def write(args: argparse.Namespace, trials: list[dict[str, Any]], codes: list[int], left: list[str]) -> list[str]:
    """Record what there is by now. codes: exit statuses of Ctrl-C. Returns what is wrong with it."""
    wrong = [one for found in trials for one in wrongs(found)] + [f"after Ctrl-C {one} is left" for one in left]
    wrong += [f"Ctrl-C ended a server with {code}" for code in codes if code]
    results = {"trials": trials, "exit_statuses": codes, "wrong": wrong}
    settings = {name: value for name, value in vars(args).items() if name not in ("log", "output")}
    write_report(args.output, build_report("rank_faults", settings, results))
    return wrong


def strike_all(server: Server, args: argparse.Namespace, first: int, trials: list[dict[str, Any]]) -> None:
    """A server's share of every fault."""
    print(f"up after {server.wait(healthy=True):.1f} s", flush=True)
    for fault in args.faults:
        for number in range(first, args.times, args.servers):
            found = once(server, fault, number)
            with WRITING:
                trials.append(found)
                write(args, trials, [], [])
            print(f"{fault} {number}: {'; '.join(wrongs(found)) or 'as it should be'}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--device", choices=sorted(N_TOKENS), default="cpu")
    parser.add_argument("--servers", type=int, default=1, help="at once, on the same cores or GPUs")
    parser.add_argument("--ranks", type=int, default=2, help="of each stage")
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--groups", type=int, default=1, help="data-parallel ranks")
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--log", type=pathlib.Path, default=pathlib.Path("rank_faults.log"))
    parser.add_argument("--output", default=str(RESULTS / "rank_faults.json"))
    args = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # where it is ignored, it would be in what is started
    machine, trials = Machine(args.device), list[dict[str, Any]]()
    sizes = ["--tensor-parallel-size", str(args.ranks), "--pipeline-parallel-size", str(args.stages)]
    sizes += ["--data-parallel-size", str(args.groups)]
    sizes += [] if args.device == "cpu" else ["--gpu-memory-utilization", "0.95", "--kv-cache-memory-bytes", "2GiB"]
    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(args.servers) as pool:
        logs = [args.log.with_stem(f"{args.log.stem}_{i}") if i else args.log for i in range(args.servers)]
        servers = list[Server]()
        try:
            for i, log in enumerate(logs):
                servers.append(Server(sizes, pathlib.Path(folder, str(i)), log, args.device))
            for done in [pool.submit(strike_all, server, args, i, trials) for i, server in enumerate(servers)]:
                done.result()
            ends = list(pool.map(at_the_end, servers))
        finally:
            for server in servers:
                server.process.kill()
    for fault in args.faults:
        print(summary(fault, [found for found in trials if found["fault"] == fault]), flush=True)
    left = [one for _, found in ends for one in found] + machine.left()
    wrong = write(args, trials, [code for code, _ in ends], left)
    print("\n".join(wrong) or "every fault was seen in time, and nothing is left")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
