"""Mixed load on a live server for any number of seconds, with faults; nothing may hang, leak or change.

    python benchmarks/server_soak.py --seconds 1800 --pause 10 --clients 6 --pace 1.0 --api-processes 2 \\
        --out benchmarks/results/server_soak.json

The bundled model on the CPU. Clients stream, complete, chat, ask for JSON, leave, read slowly, send nonsense and
grammars that crash or loop, and make batches; each second one that is a process of its own is killed. The engine is
killed three times, and stopped (SIGSTOP) once for `--pause` seconds, as is an API process; of several API processes two
are killed.
A canary request must always bring the same bytes. At the
end every sequence and page must be free, every file descriptor back, and memory flat, the engine's and that of the
API processes: its median in the last quarter against the second. Prints one JSON object; exit code 1 if something is
wrong. `--pace` makes the load lighter.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import json
import os
import pathlib
import platform
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time

import aiohttp
import jsonschema
import psutil

CANARY = {"model": "demo", "prompt": "def add(a, b):", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["dog", "cat"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["kind", "age"],
    "additionalProperties": False,
}
BAD_GRAMMARS = (
    '%ignore / +/\nstart: /[b-d]{3}/ " " /x/',
    '%ignore /a+/\nstart: "a" "a"',
    "\n".join(f"r{i}: r{i + 1}" for i in range(6000)) + '\nr6000: "x"\nstart: r0',
    "start: foo",
)
"""Ones that loop while they are followed or compiled, that overflow a stack, and a plainly wrong one."""
BATCH_LINES = 12
BATCH_S = 900.0
"""Longer than a batch takes beside the load, faults included."""
HANG_S = 120.0
"""Longer than any request can take, an engine's restart and a pause included."""
MAX_GROWTH = 0.05
KILLED_CLIENT = """
import socket, sys
s = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
b = b'{"model":"demo","prompt":"x","max_tokens":900,"ignore_eos":true,"stream":true}'
s.sendall(b"POST /v1/completions HTTP/1.1\\r\\nhost: localhost\\r\\ncontent-type: application/json\\r\\n"
          b"content-length: %d\\r\\n\\r\\n" % len(b) + b)
while s.recv(65536): pass
"""


class Soak:
    """The server under test and what was seen of it."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self.base = f"http://127.0.0.1:{self.port}"
        command = [sys.executable, "-m", "quire", "serve", "--port", str(self.port), "--num-threads", "1",
                   "--num-gpu-blocks-override", "800", "--max-num-seqs", "32", "--max-num-waiting", "48",
                   "--write-timeout", "5", "--shutdown-timeout", "10", "--max-engine-restarts", "10",
                   "--structured-outputs-compile-seconds", "1", "--data-dir", tempfile.mkdtemp(prefix="quire-soak-"),
                   "--api-processes", str(options.api_processes), "--disable-log-stats"]  # fmt: skip
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        self.counts: collections.Counter[str] = collections.Counter()
        self.problems: list[str] = []
        self.samples: list[tuple[int, int, int]] = []
        """Bytes and file descriptors of all API processes, bytes of the engine."""
        self.golden = ""
        self.session: aiohttp.ClientSession

    def parts(self) -> tuple[psutil.Process, list[psutil.Process]]:
        """(engine, API processes)."""
        main = psutil.Process(self.process.pid)
        children = {child: " ".join(child.cmdline()) for child in main.children()}
        processes = [child for child, command in children.items() if "api_process" in command]
        return next(child for child, command in children.items() if "engine" in command), processes or [main]

    def sample(self) -> None:
        """Note memory and descriptors, unless a process is missing."""
        with contextlib.suppress(psutil.Error, StopIteration):
            engine, api = self.parts()
            if len(api) == self.options.api_processes:
                rss, fds = sum(one.memory_info().rss for one in api), sum(one.num_fds() for one in api)
                self.samples.append((rss, fds, engine.memory_info().rss))

    async def get(self, path: str) -> dict[str, object]:
        """JSON of a path."""
        async with self.session.get(self.base + path) as answer:
            found: dict[str, object] = await answer.json()
            return found

    async def ready(self) -> None:
        """Wait until /health says 200, from every API process."""
        in_a_row = 0
        while in_a_row < 8:
            await asyncio.sleep(0.1)
            with contextlib.suppress(aiohttp.ClientError):
                async with self.session.get(self.base + "/health") as answer:
                    in_a_row = in_a_row + 1 if answer.status == 200 else 0

    async def canary(self) -> None:
        """The same bytes as ever, or an honest refusal."""
        async with self.session.post(self.base + "/v1/completions", json=CANARY) as answer:
            body = await answer.json()
        if answer.status == 200:
            text = body["choices"][0]["text"]
            self.golden = self.golden or text
            self.counts["canary"] += 1
            if text != self.golden:
                self.problems.append("the canary changed")
        elif answer.status not in (429, 503):
            self.problems.append(f"canary: {answer.status}")

    async def client(self, seed: int) -> None:
        """One of the users, until it is cancelled."""
        rng = random.Random(seed)
        kinds = [self.stream, self.whole, self.leave, self.nonsense, self.chat, self.look, self.form, self.grammar]
        while True:
            kind = rng.choices(kinds, (5, 4, 3, 2, 3, 1, 3, 1))[0]
            try:
                async with asyncio.timeout(HANG_S):
                    self.counts[f"{kind.__name__} {await kind(rng)}"] += 1
            except TimeoutError:
                self.problems.append(f"{kind.__name__} hung")
            except aiohttp.ClientError as error:
                self.counts[f"{kind.__name__} {type(error).__name__}"] += 1
                if not isinstance(error, (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError)):
                    self.problems.append(f"{kind.__name__}: {error!r}")
            await asyncio.sleep(rng.expovariate(1 / self.options.pace))

    async def stream(self, rng: random.Random, leave: bool = False) -> str:
        """A stream, read to its end unless the user leaves."""
        body = {"model": "demo", "prompt": "x" * rng.randrange(1, 400), "max_tokens": rng.randrange(1, 120),
                "stream": True, "n": rng.choice([1, 1, 2]), "ignore_eos": True,
                "user": f"{rng.randrange(9)}"}  # fmt: skip
        async with self.session.post(self.base + "/v1/completions", json=body) as answer:
            if answer.status != 200:
                await answer.read()
                return str(answer.status)
            last = b""
            async for line in answer.content:
                last = line if line.startswith(b"data: ") else last
                if leave and rng.random() < 0.1:
                    answer.close()
                    return "left"
                if rng.random() < 0.02:
                    await asyncio.sleep(0.3)
        if last.strip() == b"data: [DONE]":
            return "done"
        if b'"error"' not in last:
            self.problems.append(f"a stream ended with {last[:80]!r}")
        return "error event"

    async def leave(self, rng: random.Random) -> str:
        """A stream that its client leaves at some time."""
        return await self.stream(rng, leave=True)

    async def whole(self, rng: random.Random) -> str:
        """A completion in one piece."""
        body = {"model": "demo", "prompt": [rng.randrange(500) for _ in range(rng.randrange(1, 300))],
                "max_tokens": rng.randrange(1, 60), "logprobs": rng.choice([None, 2])}  # fmt: skip
        async with self.session.post(self.base + "/v1/completions", json=body) as answer:
            await answer.json()
        return str(answer.status)

    async def chat(self, rng: random.Random) -> str:
        """A conversation with a shared beginning."""
        messages = [{"role": "system", "content": "Be brief. " * 20}, {"role": "user", "content": f"{rng.random()}"}]
        body = {"model": "demo", "messages": messages, "max_tokens": rng.randrange(1, 40)}
        async with self.session.post(self.base + "/v1/chat/completions", json=body) as answer:
            await answer.json()
        return str(answer.status)

    async def nonsense(self, rng: random.Random) -> str:
        """What must be refused in words."""
        data = rng.choice([b"{", b"[]", b'{"model":"demo","prompt":""}', b'{"model":"x","prompt":"x"}', b"\xff" * 5000,
                           b'{"model":"demo","prompt":"x","temperature":1e999}', b"[" * 50000])  # fmt: skip
        headers = {"content-type": "application/json"}
        async with self.session.post(self.base + "/v1/completions", data=data, headers=headers) as answer:
            body = await answer.json()
        if answer.status not in (400, 404, 503) or "message" not in body["error"]:
            self.problems.append(f"nonsense got {answer.status}")
        return str(answer.status)

    async def form(self, rng: random.Random) -> str:
        """JSON that fits a schema, one of a few hundred."""
        schema = {**SCHEMA, "title": f"{rng.randrange(300)}"}
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        body = {"model": "demo", "messages": [{"role": "user", "content": "JSON:"}], "max_tokens": 60,
                "response_format": form}  # fmt: skip
        async with self.session.post(self.base + "/v1/chat/completions", json=body) as answer:
            found = await answer.json()
        if answer.status == 200 and found["choices"][0]["finish_reason"] == "stop":
            try:
                jsonschema.validate(json.loads(found["choices"][0]["message"]["content"]), SCHEMA)
            except (ValueError, jsonschema.ValidationError) as error:
                self.problems.append(f"the text does not fit its schema: {error}")
        return str(answer.status)

    async def grammar(self, rng: random.Random) -> str:
        """A grammar that once ended servers, never the same text twice."""
        text = f"{rng.choice(BAD_GRAMMARS)}\nunused: \"{rng.random()}\""
        body = {"model": "demo", "prompt": "x", "max_tokens": 20, "structured_outputs": {"grammar": text}}
        async with self.session.post(self.base + "/v1/completions", json=body) as answer:
            await answer.read()
        if answer.status not in (400, 429, 503):
            self.problems.append(f"a bad grammar got {answer.status}")
        return str(answer.status)

    async def batches(self) -> None:
        """Batches one after the other, each of which must come to its end with one output for each line."""
        while True:
            with contextlib.suppress(aiohttp.ClientError, KeyError):
                await self.batch()
            await asyncio.sleep(2.0)

    async def batch(self) -> None:
        """One batch; refusals and lost connections are tried again by the next one."""
        bodies = [{"model": "demo", "prompt": f"line {i}", "max_tokens": 16} for i in range(BATCH_LINES)]
        bodies[BATCH_LINES // 2]["structured_outputs"] = {"grammar": f"{BAD_GRAMMARS[0]}\nb: \"{time.time()}\""}
        lines = [{"custom_id": f"{i}", "method": "POST", "url": "/v1/completions", "body": body}
                 for i, body in enumerate(bodies)]  # fmt: skip
        form = aiohttp.FormData({"purpose": "batch"})
        form.add_field("file", "\n".join(map(json.dumps, lines)), filename="a.jsonl")
        async with self.session.post(self.base + "/v1/files", data=form) as answer:
            file_id = (await answer.json())["id"]
        body = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
        async with self.session.post(self.base + "/v1/batches", json=body) as answer:
            batch = await answer.json()
        batch_id, deadline_s = batch["id"], time.monotonic() + BATCH_S
        while batch.get("status") not in ("completed", "failed") and time.monotonic() < deadline_s:
            await asyncio.sleep(1.0)
            with contextlib.suppress(aiohttp.ClientError):
                found = await self.get(f"/v1/batches/{batch_id}")
                batch = found if "status" in found else batch
        counts = batch["request_counts"]
        self.counts[f"batch {batch['status']}"] += 1
        if batch["status"] != "completed" or counts["completed"] + counts["failed"] != BATCH_LINES:
            self.problems.append(f"a batch came to {batch['status']} with {counts}")
        elif counts["failed"] != 1:
            self.problems.append(f"{counts['failed']} lines of a batch failed, where one has to")

    async def look(self, _rng: random.Random) -> str:
        """What monitoring does."""
        for path in ("/metrics", "/health", "/v1/models"):
            async with self.session.get(self.base + path) as answer:
                await answer.read()
        return "ok"

    async def kill_clients(self) -> None:
        """Each second a client that is a process is killed in the middle of its stream."""
        while True:
            child = subprocess.Popen([sys.executable, "-I", "-S", "-c", KILLED_CLIENT, str(self.port)])
            try:
                await asyncio.sleep(1.0)
            finally:
                child.kill()
                child.wait()
            self.counts["client killed"] += 1

    async def faults(self) -> None:
        """The engine killed three times, of several API processes two, and two pauses, spread over the time."""
        slice_s = self.options.seconds / 8
        for at in range(3):
            await asyncio.sleep(slice_s / 2)
            if self.options.api_processes > 1 and at < 2:
                self.parts()[1][at].kill()
                self.counts["API process killed"] += 1
            await asyncio.sleep(slice_s / 2)
            self.parts()[0].kill()
            self.counts["engine killed"] += 1
        await asyncio.sleep(slice_s)
        for pick in (lambda: self.parts()[0], lambda: self.parts()[1][0]):
            victim = pick()
            victim.send_signal(signal.SIGSTOP)
            await asyncio.sleep(self.options.pause)
            victim.send_signal(signal.SIGCONT)
            self.counts["stopped"] += 1
            await asyncio.sleep(slice_s)

    async def run(self) -> dict[str, object]:
        """The whole soak; the result."""
        connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as self.session:
            await self.ready()
            await self.canary()
            idle = (await self.get("/v1/engine"))["stats"]
            began_s = time.monotonic()
            tasks = [asyncio.create_task(self.client(i)) for i in range(self.options.clients)]
            tasks += [asyncio.create_task(work()) for work in (self.kill_clients, self.faults, self.batches)]
            while time.monotonic() - began_s < self.options.seconds:
                await asyncio.sleep(1.0)
                self.sample()
                with contextlib.suppress(aiohttp.ClientError):
                    await self.canary()
            for task in tasks:
                task.cancel()
            for outcome in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(outcome, Exception):
                    self.problems.append(f"the soak itself: {outcome!r}")
        async with aiohttp.ClientSession() as self.session:
            await self.ready()
            await asyncio.sleep(6.0)
            self.check_idle(idle, (await self.get("/v1/engine"))["stats"])
            await self.canary()
        return self.result()

    def check_idle(self, before: dict[str, int], after: dict[str, int]) -> None:
        """Nothing is left of the load."""
        for name in ("n_running", "n_waiting"):
            if after[name]:
                self.problems.append(f"{name} = {after[name]} at the end")
        if after["n_pages_free"] != before["n_pages"]:
            self.problems.append(f"{before['n_pages'] - after['n_pages_free']} pages are not free at the end")

    def result(self) -> dict[str, object]:
        """Figures, and what is wrong."""
        self.sample()
        quarter = max(1, len(self.samples) // 4)
        mib: dict[str, list[float]] = {}
        for name, column in (("api_rss_mib", 0), ("engine_rss_mib", 2)):
            parts = [self.samples[at * quarter : (at + 1) * quarter] or self.samples for at in range(4)]
            medians = [statistics.median(sample[column] for sample in part) for part in parts]
            early, late = medians[1], medians[3]
            mib[name] = [round(median / 2**20, 1) for median in medians]
            if late / early - 1 > MAX_GROWTH:
                self.problems.append(f"{name} grew by {late / early - 1:.1%}")
        fds = self.samples[-1][1]
        if fds > 64 * self.options.api_processes:
            self.problems.append(f"{fds} file descriptors are open at the end")
        return {
            "seconds": self.options.seconds, **mib, "fds_at_end": fds, "counts": dict(sorted(self.counts.items())),
            "problems": sorted(set(self.problems)),
        }  # fmt: skip


def conditions() -> dict[str, object]:
    """Where and how this runs."""
    names = [line.split(":")[1].strip() for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines()
             if line.startswith("model name")]  # fmt: skip
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=pathlib.Path(__file__).parent,
                            capture_output=True, text=True).stdout.strip()  # fmt: skip
    return {"commit": commit, "hardware": f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores",
            "load_average": round(os.getloadavg()[0], 2),
            "command": " ".join(["python", "benchmarks/server_soak.py", *sys.argv[1:]])}  # fmt: skip


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--pause", type=float, default=4.0, help="seconds for which processes are stopped")
    parser.add_argument("--pace", type=float, default=0.25, help="mean seconds between two requests of a client")
    parser.add_argument("--api-processes", type=int, default=1)
    parser.add_argument("--out", type=pathlib.Path, help="also write the JSON here")
    options = parser.parse_args()
    where = conditions()
    soak = Soak(options)
    try:
        result = where | asyncio.run(soak.run())
        soak.process.send_signal(signal.SIGTERM)
        if soak.process.wait(30) != 0:
            result["problems"] = [*result["problems"], f"exit status {soak.process.returncode}"]  # type: ignore[misc]
    finally:
        soak.process.kill()
    text = json.dumps(result, indent=1)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n")
    return 1 if result["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
