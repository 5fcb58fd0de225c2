"""Replicas that come and go with the load, requests counted in and out.

    python -m benchmarks.replica_scaling

Starts one Ray node on this machine and a server with `autoscaling_config` from 1 to 2 replicas. A few clients keep
requests open, then many, until the second replica serves and for some seconds more; then few again, until one is left.
Half of the requests are streamed. What must hold: 1, 2 and 1 replicas, in time; every request is answered whole, also
those that run while a replica is taken away. Exit code 1 if not. Needs `pip install '.[ray]'`, psutil, and that no
other Ray runs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import pathlib
import secrets
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any, Final

import aiohttp

from benchmarks.replica_kills import LIMIT_S, RESULTS, Load, Node, n_slots, wait_nodes
from benchmarks.served import Server, free_port, served
from quire.bench.report import build_report, write_report

SLOTS: Final = 16
LOOK_S: Final = 0.25
SCALING: Final = {
    "min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 8, "upscale_delay_s": 2, "downscale_delay_s": 5,
    "look_back_period_s": 2, "metrics_interval_s": 1,
}  # fmt: skip
"""Ray Serve's; its own delays are 30 and 600 s."""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Raise and lower the load, count replicas and requests.")
    parser.add_argument("--few", type=int, default=2, help="requests open while the load is low")
    parser.add_argument("--many", type=int, default=24, help="while it is high: three times a replica's target")
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=6.0, help="of each load, once the replicas are as they should")
    parser.add_argument("--output", default=str(RESULTS / "replica_scaling.json"))
    return parser.parse_args()


class Timeline:
    """How many replicas served when."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session, self._began_s = session, time.monotonic()
        self.changes: list[dict[str, Any]] = []

    @property
    def n(self) -> int:
        """Replicas now."""
        return int(self.changes[-1]["n_replicas"]) if self.changes else 0

    @property
    def now_s(self) -> float:
        """Since the beginning."""
        return time.monotonic() - self._began_s

    async def watch(self) -> None:
        """Until it is cancelled."""
        while True:
            n = await n_slots(self._session) // SLOTS
            if n != self.n:
                self.changes.append({"at_s": self.now_s, "n_replicas": n})
            await asyncio.sleep(LOOK_S)


@contextlib.asynccontextmanager
async def watched(session: aiohttp.ClientSession) -> AsyncIterator[Timeline]:
    """A timeline that is kept meanwhile."""
    timeline = Timeline(session)
    watching = asyncio.create_task(timeline.watch())
    try:
        yield timeline
    finally:
        watching.cancel()


async def phase(
    session: aiohttp.ClientSession, timeline: Timeline, n_open: int, n_replicas: int, args: argparse.Namespace
) -> dict[str, Any]:
    """Keep so many requests open until there are so many replicas, and some seconds more."""
    load, began_s, reached_s = Load(session, args.tokens), timeline.now_s, None
    while timeline.now_s - began_s < LIMIT_S:
        await load.run(n_open, args.seconds if reached_s is not None or timeline.n == n_replicas else 1.0)
        if reached_s is not None:
            break
        if timeline.n == n_replicas:
            reached_s = timeline.now_s - began_s
    found = {
        "n_open": n_open, "began_s": began_s, "wanted": n_replicas, "n_replicas": timeline.n, "reached_s": reached_s,
        "n_in": load._n, "n_out": load.ends.total(), "ends": dict(sorted(load.ends.items())),
        "longest_s": load.longest_s,
    }  # fmt: skip
    print(json.dumps(found), flush=True)
    return found


async def run(base_url: str, args: argparse.Namespace) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(phases, changes of the number of replicas)."""
    timeout, connector = aiohttp.ClientTimeout(total=LIMIT_S), aiohttp.TCPConnector(limit=0)
    async with (
        aiohttp.ClientSession(base_url, timeout=timeout, connector=connector) as session,
        watched(session) as timeline,
    ):
        plan = ((args.few, 1), (args.many, 2), (args.few, 1))
        return [await phase(session, timeline, *each, args) for each in plan], timeline.changes


def faults(phases: list[dict[str, Any]]) -> list[str]:
    """What must not be."""
    wrong = []
    for found in phases:
        name = f"{found['n_open']} open"
        if found["reached_s"] is None or found["n_replicas"] != found["wanted"]:
            wrong.append(f"{name}: {found['n_replicas']} replicas, and not {found['wanted']}")
        if found["n_in"] != found["n_out"]:
            wrong.append(f"{name}: {found['n_in']} in, {found['n_out']} out")
        wrong += [f"{name}: {n} x {end}" for end, n in found["ends"].items() if not end.endswith(": ok")]
    return wrong


@contextlib.contextmanager
def serving(folder: pathlib.Path) -> Iterator[Server]:
    """A server on a Ray node of its own."""
    port = free_port()
    node = Node("--head", f"--port={port}", "--include-dashboard=false", "--num-cpus=2")
    command = [
        sys.executable, "-m", "quire", "serve", "--ray-address", f"127.0.0.1:{port}", "--max-num-seqs", str(SLOTS),
        "--autoscaling-config", json.dumps(SCALING), "--port", str(free_port()),
    ]  # fmt: skip
    try:
        wait_nodes(f"127.0.0.1:{port}", 1)
        with served(command, folder / "server.log", LIMIT_S) as server:
            yield server
    finally:
        node.kill()


def main() -> int:
    args = parse_arguments()
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
    with tempfile.TemporaryDirectory() as folder, serving(pathlib.Path(folder)) as server:
        phases, changes = asyncio.run(run(server.base_url, args))
    wrong = faults(phases)
    settings = {name: value for name, value in vars(args).items() if name != "output"}
    settings["autoscaling_config"] = SCALING
    results = {"phases": phases, "replicas": changes, "faults": wrong}
    write_report(args.output, build_report("replica_scaling", settings, results))
    print("\n".join(wrong) or "replicas went 1, 2, 1, and nothing was lost")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
