"""The load generator against a server whose every delay is known."""

from __future__ import annotations

import asyncio
import json
import math
import pathlib
import subprocess
import sys
import time
from collections.abc import AsyncIterator

import numpy as np
import pytest
from aiohttp import web

from quire.bench.client import ClientTrace, CompletionsClient, check_base_url, first_model, open_session
from quire.bench.datasets import BenchRequest
from quire.bench.loadgen import run_load
from quire.bench.options import ServeBenchOptions
from quire.bench.serving import measure_serving, parse_goodput, serving_metrics
from quire.core.errors import ConfigError, EngineError

FIRST_S, GAP_S = 0.08, 0.02
MARGIN_S = 0.05
"""How long a chunk may usually take from the server's write to the client's note of it."""


class Server:
    """An OpenAI-compatible server that answers token i at `FIRST_S + i * GAP_S`. `fault` spoils the completions."""

    def __init__(self) -> None:
        self.fault = ""
        self.usage = True
        self.first_s = FIRST_S
        self.crowd = 1
        """Nobody is answered until so many requests are open."""
        self.crowded = asyncio.Event()
        self.writes_s: list[list[float]] = []
        """When each chunk of each request was written."""
        self.bodies: list[dict[str, object]] = []
        self.n_open = self.most_open = 0
        self.base_url = ""
        self.explanations: list[dict[str, object]] = []
        """One for each question, the last one for all others; empty: it knows no such question, as other engines."""
        self.asked: list[str] = []

    async def models(self, _: web.Request) -> web.Response:
        if self.fault == "no key":
            return web.json_response({"error": {"message": "no key"}}, status=401)
        return web.json_response({"object": "list", "data": [{"id": "fake"}, {"id": "other"}]})

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if self.fault == "refuse":
            return web.json_response({"error": {"message": "no"}}, status=400)
        name = f"cmpl-{len(self.bodies)}"
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "x-request-id": name})
        await response.prepare(request)
        self.n_open += 1
        self.most_open = max(self.most_open, self.n_open)
        if self.n_open >= self.crowd:
            self.crowded.set()
        await asyncio.wait_for(self.crowded.wait(), 30)
        writes_s: list[float] = []
        self.writes_s.append(writes_s)
        await asyncio.sleep(self.first_s)
        for i in range(body["max_tokens"]):
            writes_s.append(time.perf_counter())
            await response.write(b'data: {"choices": [{"index": 0, "text": "x", "finish_reason": null}]}\n\n')
            if self.fault == "cut" or (self.fault == "error" and i == 1):
                break
            if i + 1 < body["max_tokens"]:
                await asyncio.sleep(GAP_S)
        self.n_open -= 1
        if self.fault == "error":
            await response.write(b'data: {"error": {"message": "engine died"}}\n\n')
        elif self.fault != "cut":
            if self.usage:
                usage = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": body["max_tokens"]}}
                await response.write(b"data: " + json.dumps(usage).encode() + b"\n\n")
            await response.write(b"data: [DONE]\n\n")
        return response

    async def explain(self, request: web.Request) -> web.Response:
        self.asked.append(request.match_info["name"])
        if not self.explanations:
            return web.json_response({"error": {"message": "not found"}}, status=404)
        found = self.explanations.pop(0) if len(self.explanations) > 1 else self.explanations[0]
        return web.json_response({"id": self.asked[-1], "parts": [{"phases": [], "expectation": found}]})


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    fake = Server()
    application = web.Application()
    application.router.add_get("/v1/models", fake.models)
    application.router.add_post("/v1/completions", fake.completions)
    application.router.add_get("/v1/requests/{name}/explain", fake.explain)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    fake.base_url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield fake
    await runner.cleanup()


def options(server: Server, **fields: object) -> ServeBenchOptions:
    common = {"base_url": server.base_url, "num_prompts": 4, "input_len": 3, "output_len": 6}
    return ServeBenchOptions(ready_check_timeout_sec=2.0, **(common | fields))


async def test_times_are_those_of_the_server(server: Server) -> None:
    run = await measure_serving(options(server))
    assert run.model == "fake" and len(run.traces) == 4 and not any(trace.error for trace in run.traces)
    written_s = sorted(server.writes_s[1:])  # the first was the warm-up
    for trace, writes_s in zip(sorted(run.traces, key=lambda trace: trace.chunk_times_s), written_s, strict=True):
        lags_s = [seen_s - written_s for seen_s, written_s in zip(trace.chunk_times_s, writes_s, strict=True)]
        assert min(lags_s) > 0 and np.median(lags_s) < MARGIN_S
        assert trace.ttft_s == pytest.approx(trace.chunk_times_s[0] - trace.start_s) and trace.ttft_s >= FIRST_S
        assert trace.tpot_s == pytest.approx((trace.chunk_times_s[5] - trace.chunk_times_s[0]) / 5)
        assert trace.tpot_s >= 0.9 * GAP_S
        assert trace.e2el_s == pytest.approx(trace.ttft_s + 5 * trace.tpot_s)
        assert len(trace.itl_s) == 5 and sum(trace.itl_s) == pytest.approx(5 * trace.tpot_s)
    metrics = serving_metrics(run.traces, run.duration_s)
    assert metrics["completed"] == 4 and metrics["total_output_tokens"] == 24 and metrics["total_input_tokens"] == 12
    assert metrics["output_throughput"] == pytest.approx(24 / run.duration_s)
    assert metrics["median_tpot_ms"] == pytest.approx(1000 * np.median([trace.tpot_s for trace in run.traces]))
    assert metrics["p99_ttft_ms"] == pytest.approx(1000 * np.percentile([trace.ttft_s for trace in run.traces], 99))
    assert run.duration_s >= max(trace.e2el_s for trace in run.traces)


async def test_requests_are_what_was_asked_for(server: Server) -> None:
    await measure_serving(options(server, temperature=0.5, num_warmups=2, num_prompts=3))
    assert len(server.bodies) == 5
    timed = server.bodies[-1]
    assert timed["model"] == "fake" and timed["max_tokens"] == 6 and timed["temperature"] == 0.5
    assert timed["stream"] is True and timed["stream_options"] == {"include_usage": True}
    assert timed["ignore_eos"] is True
    prompts = [tuple(body["prompt"]) for body in server.bodies]  # type: ignore[arg-type]
    assert len(set(prompts)) == 5 and all(len(prompt) == 3 for prompt in prompts)


async def test_no_hidden_cap_on_connections(server: Server) -> None:
    server.crowd = 220
    run = await measure_serving(options(server, num_prompts=220, output_len=1, num_warmups=0))
    assert server.most_open == 220 and not any(trace.error for trace in run.traces)


async def test_max_concurrency_is_kept(server: Server) -> None:
    server.first_s = 0.3
    run = await measure_serving(options(server, num_prompts=9, output_len=1, max_concurrency=3, num_warmups=0))
    assert server.most_open == 3
    assert run.duration_s >= 0.9
    assert max(trace.ttft_s for trace in run.traces) < 0.6, "time in the client's own queue is not TTFT"


async def test_rate_spreads_the_requests(server: Server) -> None:
    run = await measure_serving(options(server, num_prompts=12, output_len=1, request_rate=40.0))
    starts_s = [trace.start_s for trace in run.traces]
    assert starts_s == sorted(starts_s) and 0.1 < starts_s[-1] - starts_s[0] < 2.0
    assert all(trace.start_s >= trace.scheduled_s for trace in run.traces)


@pytest.mark.parametrize("fault, message", [
    ("refuse", "HTTP 400"), ("cut", "the stream ended before [DONE]"), ("error", "engine died"),
])  # fmt: skip
async def test_failures_are_counted_and_named(server: Server, fault: str, message: str) -> None:
    server.fault = fault
    async with open_session("") as session:
        client = CompletionsClient(session, server.base_url + "/v1/completions", "fake", {})
        traces, duration_s = await run_load([BenchRequest([1], 4)] * 3, client.complete, [0.0] * 3)
    metrics = serving_metrics(traces, duration_s)
    assert (metrics["completed"], metrics["failed"]) == (0, 3)
    assert math.isnan(metrics["mean_ttft_ms"])  # type: ignore[arg-type]
    (error,) = metrics["errors"]  # type: ignore[misc]
    assert message in error


async def test_a_server_that_fails_the_warm_up_ends_the_run(server: Server) -> None:
    server.fault = "refuse"
    with pytest.raises(EngineError, match="warm-up request failed: HTTP 400"):
        await measure_serving(options(server))


async def test_tokens_are_chunks_when_the_server_counts_none(server: Server) -> None:
    server.usage = False
    run = await measure_serving(options(server, output_len=3))
    assert [trace.n_output for trace in run.traces] == [3] * 4
    assert serving_metrics(run.traces, run.duration_s)["n_without_usage"] == 4


async def test_readiness(server: Server) -> None:
    async with open_session("key") as session:
        assert await first_model(session, server.base_url, 1.0) == "fake"
        server.fault = "no key"
        with pytest.raises(EngineError, match="HTTP 401"):
            await first_model(session, server.base_url, 60.0)
        with pytest.raises(EngineError, match="is the server running"):
            await first_model(session, "http://127.0.0.1:1", 0.0)


NO_ADDRESSES = ("nonsense", "", "localhost:8000", "ftp://host:1", "http://", "http://host:x", "http://[::1")


@pytest.mark.parametrize("url", NO_ADDRESSES)
async def test_no_address_is_waited_for_in_vain(url: str) -> None:
    with pytest.raises(ConfigError, match=r"^--base-url .* write http://HOST:PORT$") as refused:
        await measure_serving(ServeBenchOptions(base_url=url, ready_check_timeout_sec=2.0))
    assert (url[:8] or "''") in refused.value.message


@pytest.mark.parametrize("url", ["http://h", "https://h:1/", "http://[::1]:8000", "http://10.0.0.1:80/prefix/"])
def test_addresses(url: str) -> None:
    assert check_base_url(url) == url.rstrip("/")


async def test_waiting_for_a_server_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    async with open_session("") as session:
        waiting = asyncio.create_task(first_model(session, "http://127.0.0.1:1", 1.2))
        await asyncio.sleep(0.3)
        said = capsys.readouterr().err
        wait = "waiting up to 1.2 s for the server at http://127.0.0.1:1 (nothing listens at 127.0.0.1:1 yet)\n"
        assert said == wait
        with pytest.raises(EngineError, match="is the server running"):
            await waiting
    assert capsys.readouterr().err == ""


def trace(start_s: float, *chunk_times_s: float, error: str = "") -> ClientTrace:
    return ClientTrace(10, start_s, start_s, list(chunk_times_s), len(chunk_times_s), True, error)


def expected(first: tuple[float, float], later: tuple[float, float], n_tokens: int = 5) -> dict[str, object]:
    """(expected, took) in seconds, as a server answers."""
    names = ("expected_s", "took_s")
    return {
        "unknown": None, "device": "h200", "first_token": {"n_tokens": 1, **dict(zip(names, first, strict=True))},
        "later_token": {"n_tokens": n_tokens, **dict(zip(names, later, strict=True)), "rest_s": 0.0},
    }  # fmt: skip


async def test_a_run_ends_with_what_the_servers_model_expected(server: Server) -> None:
    """A token counts once: five of 10 ms and fifteen of 30."""
    server.explanations = [expected((0.1, 0.2), (0.010, 0.01)), expected((0.3, 0.2), (0.030, 0.04), n_tokens=15)]
    run = await measure_serving(options(server, num_prompts=2))
    assert run.explained.n_requests == 2 and server.asked == ["cmpl-2", "cmpl-3"], "the first was the warm-up"
    assert run.explained.line == (
        "expected: first token 200.0 ms (+0.0 %); later token 25.0 ms (-23.1 %), of 2 requests as the server explains"
        " them"
    )


async def test_some_of_many_requests_are_asked_for(server: Server) -> None:
    server.explanations = [expected((0.1, 0.2), (0.01, 0.01))]
    run = await measure_serving(options(server, num_prompts=200, output_len=1, num_warmups=0))
    assert run.explained.n_requests == len(set(server.asked)) == 64


async def test_nothing_is_compared_where_the_server_cannot_be_asked(server: Server) -> None:
    run = await measure_serving(options(server))
    assert len(server.asked) == 1 and run.explained.line == "", "another engine's server"
    server.explanations = [{"unknown": "steps were never timed on this CPU"}]
    run = await measure_serving(options(server))
    assert run.explained.line == "expected: not known, as the server says: steps were never timed on this CPU"
    server.explanations = [{"unknown": None, "first_token": None, "later_token": None}]
    assert (await measure_serving(options(server))).explained.line == ""
    server.explanations = [{"unknown": 5}]
    assert (await measure_serving(options(server))).explained.line == "", "an answer of another shape"


def test_goodput_counts_requests_within_every_limit() -> None:
    traces = [trace(0, 0.1, 0.15), trace(0, 0.3, 0.31), trace(0, 0.1, 0.3), trace(0, 0.1), trace(0, 0.01, error="x")]
    metrics = serving_metrics(traces, 2.0, (50.0,), {"ttft": 200.0, "tpot": 50.0001})
    assert metrics["request_goodput"] == pytest.approx(2 / 2.0)
    assert metrics["request_throughput"] == pytest.approx(4 / 2.0)
    assert "request_goodput" not in serving_metrics(traces, 2.0)
    assert metrics["mean_tpot_ms"] == pytest.approx((50 + 10 + 200) / 3)


def test_start_lag_is_how_late_requests_were_sent() -> None:
    late = trace(5.0, 6.0)
    late.scheduled_s = 4.75
    assert serving_metrics([late], 1.0)["p99_start_lag_ms"] == pytest.approx(250)


def test_goodput_limits_are_parsed() -> None:
    assert parse_goodput(["ttft:200", "tpot:50.5"]) == {"ttft": 200.0, "tpot": 50.5}
    for bad in ("itl:3", "ttft", "ttft:x", "ttft:-1", "ttft:nan", ":3"):
        with pytest.raises(ConfigError, match="--goodput"):
            parse_goodput([bad])


async def run_command(*words: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "quire", *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    return process.returncode or 0, out.decode()


async def test_the_command_writes_table_report_and_plot(server: Server, tmp_path: pathlib.Path) -> None:
    words = ["bench", "serve", "--base-url", server.base_url, "--num-prompts", "5", "--output-len", "4"]
    server.explanations = [expected((0.1, 0.2), (0.01, 0.01))]
    report, page = tmp_path / "r.json", tmp_path / "p.html"
    code, out = await run_command(*words, "--output-json", str(report), "--plot", str(page), "--goodput", "ttft:9000")
    assert code == 0 and "mean_ttft_ms" in out and "request_goodput" in out
    said = "expected: first token 100.0 ms (-50.0 %); later token 10.0 ms (+0.0 %), of 5 "
    assert out.splitlines()[-1].startswith(said)
    read = json.loads(report.read_text())
    assert read["results"]["completed"] == 5 and read["benchmark"] == "serve" and read["config"]["output_len"] == 4
    assert read["results"]["expected"]["n_requests"] == 5
    assert 80 <= read["results"]["p50_ttft_ms"] < 5000
    assert "<svg" in page.read_text()
    server.fault = "cut"
    code, out = await run_command(*words, "--num-warmups", "0")
    assert code == 1 and "errors: the stream ended before [DONE]" in out


def test_serve_benchmark_needs_no_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import sys; sys.modules['torch'] = None; import quire.bench.serving, quire.cli.bench"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
