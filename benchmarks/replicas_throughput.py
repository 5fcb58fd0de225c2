"""Several engines behind one endpoint against one of them: W2 as many times, all at once, tokens a second.

    python -m benchmarks.replicas_throughput --replicas 4 --model FOLDER

The endpoint's process is that of `quire serve --replicas` without HTTP: sockets, chooser, link, text. Each replica is a
process of its own, which sees one GPU. Ray only places and watches replicas, and is left out: requests go by the
socket. All replicas are warmed up with a W2 each. Then one gets W2, and all get it as many times as there are, in turns
of `--rounds`: with the same lengths, and fresh prompts each time. The last line printed is the ratio of medians.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import pathlib
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from quire.bench.datasets import BenchRequest, nano_vllm
from quire.bench.machine import command_output
from quire.bench.report import build_report, write_report
from quire.bench.shape import PREFIX, shape_options
from quire.config.engine import EngineConfig
from quire.core.sampling import OutputKind, SamplingParams
from quire.core.ticker import ticking
from quire.engine import logs
from quire.engine.async_llm import AsyncLLM
from quire.engine.replicas.channel import EndpointAddress, Inbox
from quire.engine.replicas.chooser import Chooser
from quire.engine.replicas.link import ReplicaLink
from quire.engine.replicas.replica import EngineReplica
from quire.engine.wire import decode_commands

RESULTS = pathlib.Path(__file__).with_name("results")
START_S = 600.0
"""Longest time until all replicas are ready."""
DEVICES = "CUDA_VISIBLE_DEVICES"
READY = b"ready\n"
"""What a replica prints once its engine has started."""


def gpus_of(n: int, environment: Mapping[str, str], found: Sequence[str]) -> list[str]:
    """The GPU of each of n replicas, as CUDA names it; empty without GPUs, or if they are hidden.

    environment: whose `DEVICES`, if given, says which of the GPUs may be used. found: the machine's. SystemExit if
    there are some, but fewer than replicas: what is left over would compute on the CPU, and the ratio say nothing.
    """
    named = environment.get(DEVICES)
    gpus = list(found) if named is None else [one.strip() for one in named.split(",") if one.strip()]
    if not found or not gpus:
        return []
    if len(gpus) < n:
        raise SystemExit(f"{n} replicas need {n} GPUs, and there are {len(gpus)}: {', '.join(gpus)}")
    return gpus[:n]


class ProcessFleet:
    """`Fleet` of processes of this machine. What runs is told by the link, as nobody else watches it here."""

    def __init__(self, config: EngineConfig, n: int, gpus: Sequence[str], inbox: Inbox, chooser: Chooser) -> None:
        """gpus: of each replica, none on the CPU."""
        self.failure: str | None = None
        self.link: ReplicaLink | None = None
        self.names = [f"r{number}" for number in range(n)]
        self.eligible = list(self.names)
        """Those that get requests."""
        self._config, self._gpus, self._inbox, self._chooser = config, gpus, inbox, chooser
        self._processes: list[asyncio.subprocess.Process] = []

    async def start(self, address: EndpointAddress) -> None:
        begin_s = time.perf_counter()
        for number, name in enumerate(self.names):
            what = json.dumps([msgspec.to_builtins(self._config), msgspec.to_builtins(address), name])
            command = [sys.executable, "-m", "benchmarks.replicas_throughput", "--as-replica", what]
            process = await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
                env={**os.environ, **({DEVICES: self._gpus[number]} if self._gpus else {})},
            )  # fmt: skip
            self._processes.append(process)
        await asyncio.gather(*(self._started(number, begin_s) for number in range(len(self.names))))
        self._chooser.routable = frozenset(self.names)

    async def _started(self, number: int, begin_s: float) -> None:
        """SystemExit if the replica ends instead."""
        process, name = self._processes[number], self.names[number]
        assert process.stdout is not None
        if await process.stdout.readline() != READY:
            raise SystemExit(f"replica {name} could not be started: its message is above")
        where = f"GPU {self._gpus[number]}" if self._gpus else self._config.device
        print(f"replica {name} is ready on {where} after {time.perf_counter() - begin_s:.0f} s", flush=True)

    async def run(self, wire_id: str, message: bytes) -> None:
        assert self.link is not None
        ended = self.link._wires[wire_id].ended
        name = self._chooser.rank(wire_id, self.eligible)[0]
        self._chooser.placed(wire_id, name)
        await self._inbox.send(name, *decode_commands(message))
        await ended.wait()

    async def close(self) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()  # each ends with its input
        for process in self._processes:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), 20)


async def be_replica(what: str) -> None:
    """Until the input ends."""
    config, address, name = json.loads(what)
    replica = EngineReplica(msgspec.convert(config, EngineConfig), msgspec.convert(address, EndpointAddress), name)
    await replica.start()
    print(READY.decode(), end="", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await replica.stop()


async def run_all(llm: AsyncLLM, requests: Sequence[BenchRequest], what: str) -> dict[str, float]:
    """All at once, whole answers. what: runs, for the lines that say how far it is."""
    n_out = 0

    async def one(request: BenchRequest) -> None:
        nonlocal n_out
        params = SamplingParams(
            temperature=0.6, seed=0, max_tokens=request.output_len, ignore_eos=True, detokenize=False,
            output_kind=OutputKind.FINAL_ONLY,
        )  # fmt: skip
        async for output in llm.generate(request.prompt_token_ids, params):
            n_out += sum(len(each.token_ids) for each in output.outputs)
        ticker.advance(1)

    begin_s, cpu_s = time.perf_counter(), time.process_time()
    with ticking(f"requests of {what}", len(requests)) as ticker:
        await asyncio.gather(*map(one, requests))
    elapsed_s = time.perf_counter() - begin_s
    print(f"{what}: {n_out:,} tokens in {elapsed_s:.1f} s, {n_out / elapsed_s:,.0f} tok/s", flush=True)
    return {
        "output_tokens": n_out, "elapsed_s": elapsed_s, "output_tokens_per_second": n_out / elapsed_s,
        "endpoint_cpu_share": (time.process_time() - cpu_s) / elapsed_s,
    }  # fmt: skip


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    model = shape_options(args.model) if args.model.startswith(PREFIX) else {"model": args.model}
    options: dict[str, Any] = {"skip_tokenizer_init": True, "max_num_waiting": 1 << 14, "disable_log_stats": True}
    options |= {name: getattr(args, name) for name in ("max_model_len", "max_num_seqs")}
    found = command_output("nvidia-smi", "--query-gpu=index", "--format=csv,noheader").split()
    gpus = gpus_of(args.replicas, os.environ, found if args.device in ("auto", "cuda") else [])
    options["device"] = "cuda" if gpus else args.device  # a replica that finds no GPU must not take the CPU
    config = EngineConfig(**options | model)
    chooser, inbox = Chooser(), Inbox("127.0.0.1")
    fleet = ProcessFleet(config, args.replicas, gpus, inbox, chooser)
    fleet.link = ReplicaLink(fleet, inbox, chooser, tuple)
    llm: AsyncLLM | None = None
    try:
        async with asyncio.timeout(START_S):
            llm = await AsyncLLM.over(config, fleet.link, 0)
            while len(chooser.stats().replicas) < args.replicas:
                await asyncio.sleep(0.1)
        return await compare(llm, fleet, args.requests, args.rounds)
    finally:
        if llm is not None:
            await llm.shutdown()
        await fleet.close()


async def compare(llm: AsyncLLM, fleet: ProcessFleet, n_requests: int, n_rounds: int) -> dict[str, Any]:
    """One against all, in turns. Every W2 has prompts of its own, so that nobody finds another's.

    n_requests: of each W2. Returns "one" and "all", each with what `run_all` found in every round, and "ratio", that of
    their medians in tokens a second.
    """
    every, numbers, shuffled = fleet.names, itertools.count(), random.Random(0)

    def fresh(n: int) -> list[BenchRequest]:
        requests = [request for _ in range(n) for request in nano_vllm(next(numbers))[:n_requests]]
        if n > 1:  # as they stand, every fourth of each would go to the same of four replicas: a sixth more for one
            shuffled.shuffle(requests)
        return requests

    found: dict[str, list[dict[str, float]]] = {"one": [], "all": []}
    await run_all(llm, fresh(len(every)), "warming up")
    for number in range(1, n_rounds + 1):
        fleet.eligible = every[:1]
        found["one"].append(await run_all(llm, fresh(1), f"round {number}, one replica"))
        fleet.eligible = every
        found["all"].append(await run_all(llm, fresh(len(every)), f"round {number}, {len(every)} replicas"))
    return {**found, "ratio": median(found["all"]) / median(found["one"])}


def median(runs: Sequence[Mapping[str, float]], name: str = "output_tokens_per_second") -> float:
    """Of a figure of `run_all`, over rounds."""
    return statistics.median(run[name] for run in runs)


def main() -> None:
    parser = argparse.ArgumentParser(description="Engines behind one endpoint against one of them, W2.")
    parser.add_argument("--model", default="shape:llama-3.1-8b")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--requests", type=int, default=256, help="of W2")
    parser.add_argument("--rounds", type=int, default=2, help="of one, then all")
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--output", default=str(RESULTS / "replicas_throughput.json"))
    parser.add_argument("--as-replica", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if min(args.replicas, args.requests, args.rounds) < 1:
        parser.error("--replicas, --requests and --rounds are at least 1")
    if args.as_replica:
        asyncio.run(be_replica(args.as_replica))
        return
    logs.show()
    found = asyncio.run(measure(args))
    settings = {name: value for name, value in vars(args).items() if name != "as_replica"}
    write_report(args.output, build_report("replicas_throughput", settings, found))
    one, every, share = median(found["one"]), median(found["all"]), median(found["all"], "endpoint_cpu_share")
    print(
        f"ratio {found['ratio']:.3f}: {args.replicas} replicas {every:,.0f} tok/s, one {one:,.0f} tok/s,"
        f" endpoint's share of a core {share:.2f}"
    )


if __name__ == "__main__":
    main()
