"""Replicas killed under load, requests counted in and out: an engine, a replica, a node, and a rolling update.

    python -m benchmarks.replica_kills

Starts two Ray nodes on this machine, of one CPU each, and a server with a replica on each. Clients keep a number of
requests open, half of them streamed. What must hold: a request that streams nothing is answered whole, whatever is
killed; a stream is whole or ends with the event `engine_lost`, and never after the kill's own time; nothing is cut off
without a word. Exit code 1 if one of these fails. Needs `pip install '.[ray]'`, psutil, and that no other Ray runs.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import json
import os
import pathlib
import random
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import aiohttp
import psutil

from benchmarks.served import Server, free_port, served
from quire.bench.report import build_report, write_report

RESULTS = pathlib.Path(__file__).with_name("results")
LIMIT_S = 120.0
SLOTS = 32
WAYS = ("none", "engine", "replica", "node", "update")
LOSSES = WAYS[1:4]
REST_S = 4.0
"""Between trials: Ray tells a little later than a replica that it serves. An update has a second replica to replace."""
RAY = ("-m", "ray.scripts.scripts")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Kill replicas and nodes under load and count requests in and out.")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--repeats", type=int, default=5, help="of each way but none")
    parser.add_argument("--concurrency", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=120)
    parser.add_argument("--seconds", type=float, default=8.0, help="of load; the kill comes after a third")
    parser.add_argument("--output", default=str(RESULTS / "replica_kills.json"))
    return parser.parse_args()


class Node:
    """One Ray node: `ray start --block` and all processes beneath it."""

    def __init__(self, *options: str) -> None:
        command = [sys.executable, *RAY, "start", "--block", "--num-cpus=1", "--num-gpus=0"]
        command += ["--object-store-memory=100000000", "--disable-usage-stats", *options]
        self._process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )

    def kill(self) -> None:
        """SIGKILL to every process of the node."""
        with contextlib.suppress(psutil.NoSuchProcess):
            main = psutil.Process(self._process.pid)
            every = [main, *main.children(recursive=True)]
            for one in every:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
            psutil.wait_procs(every, 10)
        self._process.wait()

    def pids(self, what: str) -> list[int]:
        """Its processes whose command line or title has `what`."""
        found = []
        for one in psutil.Process(self._process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                if what in " ".join(one.cmdline()):
                    found.append(one.pid)
        return found


def wait_nodes(address: str, n: int) -> None:
    """Until Ray has so many. address: of its head."""
    end_s = time.monotonic() + LIMIT_S
    status = ""
    while status.count("1 node_") != n:
        if time.monotonic() > end_s:
            raise TimeoutError(f"Ray does not have {n} nodes: {status}")
        time.sleep(1)
        command = [sys.executable, *RAY, "status", f"--address={address}"]
        status = subprocess.run(command, capture_output=True, text=True, check=False).stdout


class World:
    """The cluster and the server on it."""

    def __init__(self, port: int) -> None:
        self._address = f"127.0.0.1:{port}"
        self.head = Node("--head", f"--port={port}", "--include-dashboard=false")
        wait_nodes(self._address, 1)
        self.other = Node(f"--address={self._address}")
        wait_nodes(self._address, 2)
        self.server: Server | None = None

    @contextlib.contextmanager
    def serving(self, folder: pathlib.Path) -> Iterator[Server]:
        file = folder / "cluster.yaml"
        file.write_text(f"replicas: 2\nmax_num_seqs: {SLOTS}\n")
        command = [sys.executable, "-m", "quire", "serve", "--config", str(file), "--ray-address", self._address]
        with served([*command, "--port", str(free_port())], folder / "server.log", LIMIT_S) as server:
            self.server = server
            yield server

    async def strike(self, way: str) -> None:
        """Do it; for a node also bring another one."""
        if way == "engine":
            psutil.Process(self.other.pids("quire.engine.process")[0]).kill()
        elif way == "replica":
            psutil.Process(self.other.pids("ray::ServeReplica")[0]).kill()
        elif way == "node":
            await asyncio.to_thread(self.other.kill)
            self.other = Node(f"--address={self._address}")
        elif way == "update":
            assert self.server is not None
            self.server.process.send_signal(signal.SIGHUP)

    def close(self) -> None:
        self.other.kill()
        self.head.kill()


class Load:
    """Clients that keep a number of requests open."""

    def __init__(self, session: aiohttp.ClientSession, n_tokens: int) -> None:
        self._session = session
        self._n_tokens = n_tokens
        self._n = 0
        self._random = random.Random(0)
        self.ends: collections.Counter[str] = collections.Counter()
        self.longest_s = 0.0

    async def run(self, concurrency: int, seconds: float) -> None:
        end_s = time.monotonic() + seconds

        async def client() -> None:
            while time.monotonic() < end_s:
                self._n += 1
                await self._ask(self._n)

        await asyncio.gather(*(client() for _ in range(concurrency)))

    async def _ask(self, number: int) -> None:
        is_stream = self._random.random() < 0.5
        body = {
            "model": "demo", "prompt": f"{number}: a story about {number * 7}.", "max_tokens": self._n_tokens,
            "temperature": 0, "ignore_eos": True, "stream": is_stream, "stream_options": {"include_usage": True},
        }  # fmt: skip
        if not is_stream:
            del body["stream_options"]
        kind, began_s = "stream" if is_stream else "whole", time.monotonic()
        try:
            async with self._session.post("/v1/completions", json=body) as answer:
                end = await (self._read_stream(answer) if is_stream else self._read_whole(answer))
        except (aiohttp.ClientError, TimeoutError) as error:
            end = f"cut: {type(error).__name__}"
        self.longest_s = max(self.longest_s, time.monotonic() - began_s)
        self.ends[f"{kind}: {end}"] += 1

    async def _read_whole(self, answer: aiohttp.ClientResponse) -> str:
        value: Any = await answer.json()
        if answer.status != 200:
            return f"error {answer.status} {value['error']['code']}"
        return "ok" if value["usage"]["completion_tokens"] == self._n_tokens else "too short"

    async def _read_stream(self, answer: aiohttp.ClientResponse) -> str:
        if answer.status != 200:
            return f"error {answer.status} {(await answer.json())['error']['code']}"
        n_tokens, is_whole = 0, False
        async for line in answer.content:
            data = line.decode().removeprefix("data:").strip()
            if data == "[DONE]":
                is_whole = True
            elif data.startswith("{"):
                value = json.loads(data)
                if "error" in value:
                    return f"event {value['error']['code']}"
                n_tokens = (value.get("usage") or {}).get("completion_tokens", n_tokens)
        if not is_whole:
            return "cut: no end"
        return "ok" if n_tokens == self._n_tokens else "too short"


async def n_slots(session: aiohttp.ClientSession) -> int:
    """Of the replicas that serve."""
    async with session.get("/v1/load") as answer:
        return int((await answer.json())["max_num_seqs"])


async def until_two(session: aiohttp.ClientSession) -> None:
    """Until both replicas serve."""
    async with asyncio.timeout(LIMIT_S):
        while await n_slots(session) != 2 * SLOTS:
            await asyncio.sleep(0.1)


async def n_restarts(session: aiohttp.ClientSession) -> int:
    """Replicas that were lost, and engines that replicas have started again."""
    async with session.get("/metrics") as answer:
        lines = (await answer.text()).splitlines()
    return int(float(next(line for line in lines if line.startswith("quire:engine_restarts_total")).split()[-1]))


async def until_recovered(session: aiohttp.ClientSession, way: str, n_before: int) -> float:
    """Seconds until the loss is seen and both replicas serve again."""
    began_s = time.monotonic()
    async with asyncio.timeout(LIMIT_S):
        while way == "engine" and await n_restarts(session) == n_before:
            await asyncio.sleep(0.1)
        while way in ("replica", "node", "update") and await n_slots(session) == 2 * SLOTS:
            await asyncio.sleep(0.1)
        await until_two(session)
    return time.monotonic() - began_s


async def trial(world: World, base_url: str, way: str, args: argparse.Namespace) -> dict[str, Any]:
    """One load with one strike in it."""
    timeout = aiohttp.ClientTimeout(total=LIMIT_S)
    async with aiohttp.ClientSession(base_url, timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        await until_two(session)
        await asyncio.sleep(REST_S * 4 if way == "update" else REST_S)
        load = Load(session, args.tokens)
        n_before = await n_restarts(session)
        running = asyncio.create_task(load.run(args.concurrency, args.seconds))
        await asyncio.sleep(args.seconds / 3)
        await world.strike(way)
        recovery = asyncio.create_task(until_recovered(session, way, n_before))
        await running
        recovery_s = await recovery
    found = {
        "way": way, "n_in": load._n, "n_out": load.ends.total(), "ends": dict(sorted(load.ends.items())),
        "longest_s": load.longest_s, "recovery_s": recovery_s,
    }  # fmt: skip
    print(json.dumps(found), flush=True)
    return found


def faults(found: dict[str, Any]) -> list[str]:
    """What must not be."""
    allowed = {"whole: ok", "stream: ok"} | ({"stream: event engine_lost"} if found["way"] in LOSSES else set())
    wrong = [f"{found['way']}: {count} x {end}" for end, count in found["ends"].items() if end not in allowed]
    return wrong + ([] if found["n_in"] == found["n_out"] else [f"{found['way']}: {found['n_in']} in"])


async def run(args: argparse.Namespace, folder: pathlib.Path) -> list[dict[str, Any]]:
    world = World(free_port())
    try:
        with world.serving(folder) as server:
            trials = [way for way in args.ways for _ in range(1 if way == "none" else args.repeats)]
            return [await trial(world, server.base_url, way, args) for way in trials]
    finally:
        world.close()


def main() -> int:
    args = parse_arguments()
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(run(args, pathlib.Path(folder)))
    wrong = [fault for each in found for fault in faults(each)]
    write_report(args.output, build_report("replica_kills", vars(args), {"trials": found, "faults": wrong}))
    print("\n".join(wrong) or "nothing was lost")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
