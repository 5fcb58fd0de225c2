"""Several engines behind one endpoint against one of them: W2 as many times, all at once, tokens a second.

    python -m benchmarks.replicas_throughput --replicas 4 --model FOLDER

The endpoint's process is that of `quire serve --replicas` without HTTP: sockets, chooser, link, text. Each replica is a
process of its own, which sees one GPU. Ray only places and watches replicas, and is left out: requests go by the
socket. First one replica gets W2, then all get it as many times as there are, the same requests in the same order.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from quire.bench.datasets import BenchRequest, nano_vllm
from quire.bench.report import build_report, write_report
from quire.bench.shape import PREFIX, shape_options
from quire.config.engine import EngineConfig
from quire.core.sampling import OutputKind, SamplingParams
from quire.engine.async_llm import AsyncLLM
from quire.engine.replicas.channel import EndpointAddress, Inbox
from quire.engine.replicas.chooser import Chooser
from quire.engine.replicas.link import ReplicaLink
from quire.engine.replicas.replica import EngineReplica
from quire.engine.wire import decode_commands

RESULTS = pathlib.Path(__file__).with_name("results")
START_S = 300.0
DEVICES = "CUDA_VISIBLE_DEVICES"
READY = b"ready\n"
"""What a replica prints once its engine has started."""


class ProcessFleet:
    """`Fleet` of processes of this machine. What runs is told by the link, as nobody else watches it here."""

    def __init__(self, config: EngineConfig, n: int, inbox: Inbox, chooser: Chooser) -> None:
        self.failure: str | None = None
        self.link: ReplicaLink | None = None
        self.names = [f"r{number}" for number in range(n)]
        self.eligible = list(self.names)
        """Those that get requests."""
        self._config, self._inbox, self._chooser = config, inbox, chooser
        self._processes: list[asyncio.subprocess.Process] = []

    async def start(self, address: EndpointAddress) -> None:
        for number, name in enumerate(self.names):
            what = json.dumps([msgspec.to_builtins(self._config), msgspec.to_builtins(address), name])
            devices = os.environ.get(DEVICES, "").split(",")
            device = devices[number] if len(devices) > number else str(number)
            command = [sys.executable, "-m", "benchmarks.replicas_throughput", "--as-replica", what]
            process = await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
                env={**os.environ, DEVICES: device},
            )  # fmt: skip
            self._processes.append(process)
        for name, process in zip(self.names, self._processes, strict=True):
            assert process.stdout is not None
            if await process.stdout.readline() != READY:
                raise SystemExit(f"replica {name} could not be started: its message is above")
        self._chooser.routable = frozenset(self.names)

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


async def run_all(llm: AsyncLLM, requests: Sequence[BenchRequest]) -> dict[str, float]:
    """All at once, whole answers."""
    n_out = 0

    async def one(request: BenchRequest) -> None:
        nonlocal n_out
        params = SamplingParams(
            temperature=0.6, seed=0, max_tokens=request.output_len, ignore_eos=True, detokenize=False,
            output_kind=OutputKind.FINAL_ONLY,
        )  # fmt: skip
        async for output in llm.generate(request.prompt_token_ids, params):
            n_out += sum(len(each.token_ids) for each in output.outputs)

    begin_s, cpu_s = time.perf_counter(), time.process_time()
    await asyncio.gather(*map(one, requests))
    elapsed_s = time.perf_counter() - begin_s
    return {
        "output_tokens": n_out, "elapsed_s": elapsed_s, "output_tokens_per_second": n_out / elapsed_s,
        "endpoint_cpu_share": (time.process_time() - cpu_s) / elapsed_s,
    }  # fmt: skip


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    model = shape_options(args.model) if args.model.startswith(PREFIX) else {"model": args.model}
    options: dict[str, Any] = {"skip_tokenizer_init": True, "max_num_waiting": 1 << 14, "disable_log_stats": True}
    options |= {name: getattr(args, name) for name in ("device", "max_model_len", "max_num_seqs")}
    config = EngineConfig(**options | model)
    chooser, inbox = Chooser(), Inbox("127.0.0.1")
    fleet = ProcessFleet(config, args.replicas, inbox, chooser)
    fleet.link = ReplicaLink(fleet, inbox, chooser, tuple)
    llm = await AsyncLLM.over(config, fleet.link, 0)
    try:
        async with asyncio.timeout(START_S):
            while len(chooser.stats().replicas) < args.replicas:
                await asyncio.sleep(0.1)
        return await compare(llm, fleet, args.requests)
    finally:
        await llm.shutdown()
        await fleet.close()


async def compare(llm: AsyncLLM, fleet: ProcessFleet, n_requests: int) -> dict[str, Any]:
    """One, then all; the prompts of each turn are others, so that nobody finds another's."""
    turns = [nano_vllm(turn)[:n_requests] for turn in range(len(fleet.names) + 2)]
    await run_all(llm, [dataclasses.replace(one, output_len=8) for one in turns[0][: 16 * len(fleet.names)]])
    fleet.eligible = fleet.names[:1]
    one = await run_all(llm, turns[1])
    fleet.eligible = fleet.names
    every = await run_all(llm, [request for turn in turns[2:] for request in turn])
    ratio = every["output_tokens_per_second"] / one["output_tokens_per_second"]
    return {"one": one, "all": every, "ratio": ratio}


def main() -> None:
    parser = argparse.ArgumentParser(description="Engines behind one endpoint against one of them, W2.")
    parser.add_argument("--model", default="shape:llama-3.1-8b")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--requests", type=int, default=256, help="of W2")
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--output", default=str(RESULTS / "replicas_throughput.json"))
    parser.add_argument("--as-replica", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.as_replica:
        asyncio.run(be_replica(args.as_replica))
        return
    found = asyncio.run(measure(args))
    print(json.dumps(found))
    settings = {name: value for name, value in vars(args).items() if name != "as_replica"}
    write_report(args.output, build_report("replicas_throughput", settings, found))


if __name__ == "__main__":
    main()
