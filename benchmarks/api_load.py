"""The API layer alone, over the null device: streams held at once, requests and streamed tokens a second, gaps.

    python benchmarks/api_load.py held --streams 2048
    python benchmarks/api_load.py held --streams 10000 --api-processes 4
    python benchmarks/api_load.py peak
    python benchmarks/api_load.py half --rate 40        # gaps at half of the peak's requests a second

Starts its own server. The client counts events without decoding them, and shares the machine with server and engine:
`tokens_per_api_cpu_s`, what one second of one API process's own CPU time streams, does not depend on how many cores
they share. Prints one JSON object; exit code 1 if a stream failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import pathlib
import re
import resource
import signal
import socket
import subprocess
import sys
import time

import httpx
import msgspec
import psutil
import uvloop

HERE = pathlib.Path(__file__).resolve()
TAIL_BYTES = 600


def serve(arguments: list[str]) -> int:
    """The child: `api_load.py serve PORT API_PROCESSES MAX_SEQS STEP_MS`."""
    from quire.config.engine import EngineConfig
    from quire.serve.config import ServerConfig
    from quire.serve.server import run

    port, n_processes, max_seqs = map(int, arguments[:3])
    engine = EngineConfig(
        device="null", max_num_seqs=max_seqs, max_num_batched_tokens=max(8192, 2 * max_seqs), max_num_waiting=65536,
        num_gpu_blocks_override=max_seqs * 40 + 1, enable_prefix_caching=False, disable_log_stats=True,
    )  # fmt: skip
    server = ServerConfig(port=port, api_processes=n_processes, uvicorn_log_level="error")
    return run(engine, server, (str(HERE.with_name("paced_engine.py")), arguments[3]))


class Stream(asyncio.Protocol):
    """One streamed completion on its own connection."""

    def __init__(self, message: bytes) -> None:
        self._message = message
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.sent_s = time.perf_counter()
        self.first_s = self.last_s = 0.0
        self.gaps_s: list[float] = []
        self.n_events = 0
        self.tail = b""
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        self.transport.write(self._message)

    def data_received(self, data: bytes) -> None:
        n = data.count(b"data: {")
        if n:
            now_s = time.perf_counter()
            if self.first_s:
                self.gaps_s.append(now_s - self.last_s)
            else:
                self.first_s = now_s
            self.last_s = now_s
            self.n_events += n
        self.tail = (self.tail + data)[-TAIL_BYTES:]
        if b"[DONE]" in self.tail:
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    @property
    def n_tokens(self) -> int:
        """By the server's own count; -1 if the stream did not come to its end."""
        found = re.search(rb'"completion_tokens":(\d+)', self.tail)
        return int(found[1]) if found and b"[DONE]" in self.tail else -1


def message(port: int, prompt_len: int, max_tokens: int, number: int) -> bytes:
    """The request, ready for the socket."""
    prompt = [1 + (number * 7 + i) % 1000 for i in range(prompt_len)]
    body = msgspec.json.encode(
        {"model": "demo", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream": True,
         "stream_options": {"include_usage": True}}
    )  # fmt: skip
    head = f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body


async def open_stream(port: int, data: bytes) -> Stream:
    """Connect and send."""
    _, stream = await asyncio.get_running_loop().create_connection(lambda: Stream(data), "127.0.0.1", port)
    return stream


def quantile(values: list[float], share: float) -> float:
    """Of a list, 0 for an empty one; in milliseconds."""
    return round(1000 * sorted(values)[min(len(values) - 1, int(share * len(values)))], 2) if values else 0.0


class Server:
    """The child process, and the CPU time of its parts."""

    def __init__(self, n_processes: int, max_seqs: int, step_ms: float) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        command = [sys.executable, str(HERE), "serve", str(self.port), str(n_processes), str(max_seqs), str(step_ms)]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        deadline_s = time.monotonic() + 120
        while True:
            try:
                if httpx.get(f"http://127.0.0.1:{self.port}/health", timeout=5).status_code == 200:
                    break
            except httpx.TransportError:
                pass
            if time.monotonic() > deadline_s or self.process.poll() is not None:
                raise SystemExit("the server did not start")
            time.sleep(0.1)
        time.sleep(1.0)  # the other processes
        main = psutil.Process(self.process.pid)
        processes = [child for child in main.children() if any("api_process" in word for word in child.cmdline())]
        self.api = processes or [main]

    def cpu_s(self) -> float:
        """CPU seconds that the API processes have used."""
        return sum(process.cpu_times().user + process.cpu_times().system for process in self.api)

    def rss_bytes(self) -> int:
        """Memory of the API processes."""
        return sum(process.memory_info().rss for process in self.api)

    def probe_ms(self) -> dict[str, float]:
        """How long /health and /metrics take now; medians of 9."""
        found = {}
        with httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=30) as http:
            for path in ("/health", "/metrics"):
                times_s = []
                for _ in range(9):
                    began_s = time.perf_counter()
                    http.get(path)
                    times_s.append(time.perf_counter() - began_s)
                found[path] = quantile(times_s, 0.5)
        return found

    def stop(self) -> None:
        """SIGTERM twice: what runs is cut off."""
        for _ in range(2):
            self.process.send_signal(signal.SIGTERM)
            time.sleep(0.2)
        self.process.wait(30)


async def held(server: Server, options: argparse.Namespace) -> dict[str, object]:
    """Open all streams, wait until each has begun, hold them, count those that still stream."""
    before = server.rss_bytes()
    data = [message(server.port, options.prompt_len, 500, i) for i in range(options.streams)]
    began_s, cpu_s, streams = time.perf_counter(), server.cpu_s(), []
    for i in range(0, len(data), 64):
        streams += await asyncio.gather(*(open_stream(server.port, one) for one in data[i : i + 64]))
    while any(not stream.first_s and not stream.ended.done() for stream in streams):
        await asyncio.sleep(0.1)
        if time.perf_counter() - began_s > options.limit:
            break
    all_begun_s = time.perf_counter() - began_s
    for stream in streams:
        stream.gaps_s.clear()
    events = sum(stream.n_events for stream in streams)
    since_s = time.perf_counter()
    probes = await asyncio.to_thread(server.probe_ms)
    await asyncio.sleep(options.hold)
    duration_s = time.perf_counter() - since_s
    live = sum(not stream.ended.done() and bool(stream.first_s) for stream in streams)
    gaps = [gap for stream in streams for gap in stream.gaps_s]
    result = {
        "streams": options.streams, "live_at_once": live, "all_begun_s": round(all_begun_s, 2),
        "events_per_s": round((sum(stream.n_events for stream in streams) - events) / duration_s),
        "gap_p50_ms": quantile(gaps, 0.5), "gap_p99_ms": quantile(gaps, 0.99), "probe_ms": probes,
        "api_cpu_share": round((server.cpu_s() - cpu_s) / (time.perf_counter() - began_s), 2),
        "api_kb_per_stream": round((server.rss_bytes() - before) / 1024 / options.streams, 1),
        "failed": options.streams - live,
    }  # fmt: skip
    for stream in streams:
        stream.transport.abort()
    return result


async def load(server: Server, options: argparse.Namespace, rate: float) -> dict[str, object]:
    """`requests` streams, at a rate or with a fixed number in flight."""
    gate, streams, tasks = asyncio.Semaphore(options.concurrency), [], []
    began_s, cpu_s = time.perf_counter(), server.cpu_s()

    async def one(number: int) -> None:
        stream = await open_stream(server.port, message(server.port, options.prompt_len, options.output_len, number))
        streams.append(stream)
        await stream.ended
        gate.release()

    for number in range(options.requests):
        if rate:
            await asyncio.sleep(max(0.0, began_s + number / rate - time.perf_counter()))
        await gate.acquire()
        tasks.append(asyncio.create_task(one(number)))
    await asyncio.gather(*tasks)
    duration_s, cpu_s = time.perf_counter() - began_s, server.cpu_s() - cpu_s
    n_tokens = sum(max(0, stream.n_tokens) for stream in streams)
    gaps = [gap for stream in streams for gap in stream.gaps_s]
    return {
        "requests": len(streams), "requests_per_s": round(len(streams) / duration_s, 1),
        "tokens_per_s": round(n_tokens / duration_s), "api_cpu_share": round(cpu_s / duration_s, 2),
        "tokens_per_api_cpu_s": round(n_tokens / cpu_s), "requests_per_api_cpu_s": round(len(streams) / cpu_s, 1),
        "tokens_per_event": round(n_tokens / max(1, sum(stream.n_events for stream in streams)), 2),
        "ttft_p50_ms": quantile([stream.first_s - stream.sent_s for stream in streams], 0.5),
        "gap_p50_ms": quantile(gaps, 0.5), "gap_p99_ms": quantile(gaps, 0.99), "gap_max_ms": quantile(gaps, 1.0),
        "failed": sum(stream.n_tokens != options.output_len for stream in streams),
    }  # fmt: skip


def main() -> int:
    """Entry point."""
    if sys.argv[1:2] == ["serve"]:
        return serve(sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=["held", "peak", "half"])
    parser.add_argument("--streams", type=int, default=2048)
    parser.add_argument("--api-processes", type=int, default=1)
    parser.add_argument("--hold", type=float, default=10.0, help="seconds for which all streams are watched")
    parser.add_argument("--limit", type=float, default=180.0, help="seconds in which all streams must have begun")
    parser.add_argument("--step-ms", type=float, default=-1, help="time of a step; by default 500 for held, else 10")
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--concurrency", type=int, default=128)
    parser.add_argument("--rate", type=float, default=0.0, help="requests a second; 0: as many as get through")
    parser.add_argument("--prompt-len", type=int, default=16)
    parser.add_argument("--output-len", type=int, default=512)
    options = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    is_held = options.mode == "held"
    step_ms = options.step_ms if options.step_ms >= 0 else (500.0 if is_held else 10.0)
    if options.mode == "half":
        options.concurrency = 1 << 20
    server = Server(options.api_processes, options.streams if is_held else 1024, step_ms)
    try:
        result = uvloop.run(held(server, options) if is_held else load(server, options, options.rate))
    finally:
        server.stop()
    print(json.dumps({"mode": options.mode, "api_processes": options.api_processes, "step_ms": step_ms} | result))
    return 1 if result["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
