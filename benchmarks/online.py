"""A server under load: start-up, capacity, latencies at shares of the capacity, and decodes beside a long prompt.

    python -m benchmarks.online --lengths w3_lengths.json --output online.json -- --max-model-len 20480

Starts `quire serve MODEL` with the options after `--` and stops it whatever happens. The report is written after each
part, so that a run which is cut short leaves what it has measured. Figures and their names: `quire bench serve`.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import gc
import importlib.util
import itertools
import pathlib
import random
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence

import aiohttp
import uvloop

from benchmarks.online_plot import draw
from benchmarks.served import Server, free_port, served
from quire.bench.client import ClientTrace, CompletionsClient, first_model, open_session
from quire.bench.datasets import BenchRequest, from_lengths, random_tokens, read_lengths
from quire.bench.loadgen import arrival_offsets_s, run_load
from quire.bench.report import build_report, write_report
from quire.bench.serving import serving_metrics
from quire.bench.summary import percentile
from quire.core.errors import EngineError

PERCENTILES = (50.0, 90.0, 99.0)
WARM_UP_REQUESTS = 64
WARM_UP_OUTPUT = 16
BEFORE_S = 1.0
"""Gaps of this long before the long prompt give the median that the gaps beside it are compared with."""
SETTLE_TOKENS = 32
"""Tokens that every stream has had before those gaps begin."""
POLL_S = 0.01
STALL_LIMIT = 2.0
MAX_POINTS = 1500


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.online", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="shape:llama-3.1-8b")
    parser.add_argument("--lengths", required=True, help="JSON file with lists 'input' and 'output' (W3)")
    parser.add_argument("--output", required=True, help="JSON report; the plot has its name with .png")
    parser.add_argument("--starts", type=int, default=2, help="times that the server is started; the last one is used")
    parser.add_argument("--startup-limit", type=float, default=300.0, help="seconds until it must be healthy")
    parser.add_argument("--capacity", type=float, default=0.0, help="requests a second; 0 measures it")
    parser.add_argument("--capacity-requests", type=int, default=1000)
    parser.add_argument("--fractions", type=float, nargs="*", default=[0.25, 0.5, 0.75, 0.9])
    parser.add_argument("--seconds", type=float, default=20.0, help="time in which the requests of a rate arrive")
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument("--stall-streams", type=int, default=64, help="0 leaves the long prompt out")
    parser.add_argument("--stall-context", type=int, default=1024, help="prompt tokens of each stream")
    parser.add_argument("--stall-output", type=int, default=2048, help="tokens that each stream may generate")
    parser.add_argument("--stall-prompt", type=int, default=16384)
    parser.add_argument("--stall-repeats", type=int, default=3)
    parser.add_argument("--vocab-size", type=int, default=10_001, help="random token ids are below this")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("serve_options", nargs="*", metavar="-- OPTION", help="options of quire serve")
    return parser.parse_args(argv)


@dataclasses.dataclass(slots=True)
class Bench:
    """One client, and what it asks."""

    client: CompletionsClient
    lengths: list[tuple[int, int]]
    args: argparse.Namespace

    def requests(self, n: int, salt: str) -> list[BenchRequest]:
        """`n` requests with the lengths of the file, again from its start if it has fewer; fresh tokens by `salt`."""
        lengths = [self.lengths[i % len(self.lengths)] for i in range(n)]
        return from_lengths(lengths, self.args.vocab_size, f"{self.args.seed}/{salt}")(0)

    async def load(self, requests: Sequence[BenchRequest], rate: float) -> dict[str, object]:
        """Metrics of these requests at `rate` a second (inf: all at once). EngineError if one fails."""
        offsets_s = arrival_offsets_s(len(requests), rate, 1.0, self.args.seed)
        cpu_s = time.process_time()
        traces, duration_s = await run_load(requests, self.client.complete, offsets_s)
        cpu_s = time.process_time() - cpu_s
        metrics = serving_metrics(traces, duration_s, PERCENTILES)
        if metrics["failed"]:
            raise EngineError(f"{metrics['failed']} of {len(traces)} requests failed: {metrics['errors']}")
        return {"n_requests": len(requests), "client_cpu_share": cpu_s / duration_s, **metrics}

    async def warm_up(self) -> None:
        """Short requests at once and one long prompt: whatever is made on first use is made now."""
        short = [
            dataclasses.replace(one, output_len=min(one.output_len, WARM_UP_OUTPUT))
            for one in self.requests(min(WARM_UP_REQUESTS, len(self.lengths)), "warm-up")
        ]
        if self.args.stall_streams:
            short.append(self.long_prompt("warm-up"))
        await self.load(short, float("inf"))

    def long_prompt(self, salt: str) -> BenchRequest:
        """A prompt of `stall_prompt` fresh tokens that wants one token."""
        rng = random.Random(f"{self.args.seed}/long/{salt}")
        return BenchRequest(random_tokens(rng, self.args.stall_prompt, self.args.vocab_size), 1)

    async def stall(self) -> dict[str, object]:
        """Gaps between the tokens of running streams before and during the prefill of long prompts, one at a time."""
        args = self.args
        shape = [(args.stall_context, args.stall_output)] * args.stall_streams
        traces = [ClientTrace() for _ in shape]
        requests = from_lengths(shape, args.vocab_size, f"{args.seed}/streams")(0)
        pairs = zip(requests, traces, strict=True)
        streams = [asyncio.create_task(self.client.complete(one, None, trace)) for one, trace in pairs]
        rows = []
        try:
            await _until(streams, lambda: min(len(trace.chunk_times_s) for trace in traces) >= SETTLE_TOKENS)
            for i in range(args.stall_repeats):
                settled_s = time.perf_counter()
                await _until(streams, lambda begin_s=settled_s: time.perf_counter() >= begin_s + BEFORE_S)  # type: ignore[misc]
                prompt = await self.client.complete(self.long_prompt(str(i)))
                if prompt.error:
                    raise EngineError(f"the long prompt failed: {prompt.error}")
                await _until(streams, lambda end_s=prompt.chunk_times_s[0]: _all_beyond(traces, end_s))  # type: ignore[misc]
                rows.append(stall_row(traces, settled_s, prompt))
        finally:
            for stream in streams:
                stream.cancel()
            await asyncio.gather(*streams, return_exceptions=True)
        return stall_summary(rows, args.stall_streams)


def _all_beyond(traces: Sequence[ClientTrace], time_s: float) -> bool:
    return all(trace.chunk_times_s[-1] > time_s for trace in traces)


async def _until(streams: Sequence[asyncio.Task[ClientTrace]], is_reached: Callable[[], bool]) -> None:
    """Wait until `is_reached()`. EngineError if a stream ends before: it had too few tokens to generate."""
    while not is_reached():
        ended = next((stream for stream in streams if stream.done()), None)
        if ended is not None:
            raise EngineError(f"a stream ended too early ({ended.result().error or 'raise --stall-output'})")
        await asyncio.sleep(POLL_S)


def gaps(trace: ClientTrace) -> Iterator[tuple[float, float]]:
    """(begin, end) of each gap of a stream; chunks that were read together count as one."""
    times_s = sorted(set(trace.chunk_times_s))
    return itertools.pairwise(times_s)


def stall_row(traces: Sequence[ClientTrace], settled_s: float, prompt: ClientTrace) -> dict[str, object]:
    """Gaps (ms) in the time before a long prompt, and those that overlap the time until its first token."""
    begin_s, end_s = prompt.start_s, prompt.chunk_times_s[0]
    pairs = [pair for trace in traces for pair in gaps(trace)]
    before = [1000 * (end - begin) for begin, end in pairs if begin >= settled_s and end <= begin_s]
    during = [(end, 1000 * (end - begin)) for begin, end in pairs if begin < end_s and end > begin_s]
    around = [
        (round(end - begin_s, 5), round(1000 * (end - begin), 3))
        for begin, end in sorted(pairs, key=lambda pair: pair[1])
        if begin >= begin_s - 0.2 and end <= end_s + 0.2
    ]
    step = -(-len(around) // MAX_POINTS)
    return {
        "ttft_ms": 1000 * prompt.ttft_s,
        "before_ms": before,
        "during_ms": [gap for _, gap in during],
        "around": around[::step],
    }


def stall_summary(rows: Sequence[dict[str, object]], n_streams: int) -> dict[str, object]:
    """The rule's figures over all long prompts, and those of each."""
    before = [gap for row in rows for gap in row["before_ms"]]  # type: ignore[attr-defined]
    during = [gap for row in rows for gap in row["during_ms"]]  # type: ignore[attr-defined]
    median_ms, p99_ms = percentile(before, 50), percentile(during, 99)
    return {
        "n_streams": n_streams,
        "n_prompts": len(rows),
        "n_gaps_before": len(before),
        "n_gaps_during": len(during),
        "median_step_ms": median_ms,
        "p99_gap_before_ms": percentile(before, 99),
        "median_gap_during_ms": percentile(during, 50),
        "p99_gap_during_ms": p99_ms,
        "max_gap_during_ms": max(during),
        "ratio": p99_ms / median_ms,
        "limit": STALL_LIMIT,
        "is_within_limit": p99_ms <= STALL_LIMIT * median_ms,
        "median_prompt_ttft_ms": percentile([row["ttft_ms"] for row in rows], 50),  # type: ignore[misc]
        "prompts": [
            {
                "ttft_ms": row["ttft_ms"],
                "median_before_ms": percentile(row["before_ms"], 50),  # type: ignore[arg-type]
                "p99_during_ms": percentile(row["during_ms"], 99),  # type: ignore[arg-type]
            }
            for row in rows
        ],
        "around_time_s": [time_s for time_s, _ in rows[-1]["around"]],  # type: ignore[attr-defined]
        "around_gap_ms": [gap for _, gap in rows[-1]["around"]],  # type: ignore[attr-defined]
    }


async def measure(
    server: Server, results: dict[str, object], args: argparse.Namespace, save: Callable[[], None]
) -> None:
    """All parts against a running server; `save` after each."""

    async def part(name: str, work: Awaitable[dict[str, object]]) -> dict[str, object]:
        figures = await work
        print_part(name, figures)
        return figures

    lengths = read_lengths(args.lengths)
    async with open_session("") as session:
        model = await first_model(session, server.base_url, 10.0)
        fields: dict[str, object] = {"temperature": args.temperature, "ignore_eos": True}
        bench = Bench(CompletionsClient(session, server.base_url + "/v1/completions", model, fields), lengths, args)
        await bench.warm_up()
        capacity = args.capacity
        if not capacity:
            everything = bench.requests(args.capacity_requests, "capacity")
            found = await part("capacity", bench.load(everything, float("inf")))
            results["offline"], capacity = found, float(found["request_throughput"])  # type: ignore[arg-type]
        results["capacity_requests_per_s"] = capacity
        save()
        if args.stall_streams:
            results["stall"] = await part("stall", bench.stall())
            save()
        rates: list[dict[str, object]] = []
        results["rates"] = rates
        for fraction in args.fractions:
            rate = fraction * capacity
            requests = bench.requests(max(2, round(rate * args.seconds)), f"rate {fraction}")
            figures = await part(f"{100 * fraction:g} % of capacity", bench.load(requests, rate))
            rates.append({"fraction": fraction, "request_rate": rate, **figures})
            save()


def print_part(name: str, figures: dict[str, object]) -> None:
    """The figures that matter, on one line."""
    shown = (
        "request_throughput", "output_throughput", "p50_ttft_ms", "p99_ttft_ms", "p50_tpot_ms", "p99_tpot_ms",
        "p99_itl_ms", "p99_start_lag_ms", "client_cpu_share", "median_step_ms", "p99_gap_during_ms", "ratio",
        "median_prompt_ttft_ms",
    )  # fmt: skip
    print(f"{name}: " + ", ".join(f"{key} {figures[key]:.4g}" for key in shown if key in figures), flush=True)


async def first_token(base_url: str, args: argparse.Namespace) -> None:
    """One token of a short prompt. EngineError if it fails."""
    async with open_session("") as session:
        model = await first_model(session, base_url, 10.0)
        client = CompletionsClient(session, base_url + "/v1/completions", model, {"temperature": args.temperature})
        trace = await client.complete(BenchRequest(random_tokens(random.Random(0), 16, args.vocab_size), 1))
        if trace.error:
            raise EngineError(f"the first request failed: {trace.error}")


def run(args: argparse.Namespace, argv: Sequence[str]) -> dict[str, object]:
    """Start the server `starts` times, measure on the last; returns the report."""
    output = pathlib.Path(args.output)
    starts: list[dict[str, float]] = []
    results: dict[str, object] = {"is_complete": False, "starts": starts}

    def save() -> None:
        write_report(str(output), build_report("online", vars(args), results, argv=["benchmarks.online", *argv]))

    for i in range(args.starts):
        begin_s = time.perf_counter()
        command = [sys.executable, "-m", "quire", "serve", args.model, "--port", str(free_port())]
        with served([*command, *args.serve_options], output.with_suffix(".log"), args.startup_limit) as server:
            healthy_s = time.perf_counter() - begin_s
            uvloop.run(first_token(server.base_url, args))
            starts.append({"healthy_s": healthy_s, "first_token_s": time.perf_counter() - begin_s})
            print(f"start {i + 1}: " + ", ".join(f"{key} {value:.2f}" for key, value in starts[-1].items()), flush=True)
            if i == args.starts - 1:
                uvloop.run(measure(server, results, args, save))
    results["is_complete"] = True
    save()
    return results


def main(argv: Sequence[str]) -> int:
    args = parse_arguments(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `finally` stops the server
    gc.disable()  # a collection amid ten thousand chunks a second would be seen as a gap
    results = run(args, argv)
    if importlib.util.find_spec("matplotlib") is None:
        print("no plot: matplotlib is not installed (pip install 'quire[bench]')", file=sys.stderr)
    else:
        draw(results, str(pathlib.Path(args.output).with_suffix(".png")))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except (EngineError, aiohttp.ClientError) as error:
        sys.exit(f"error: {error}")
