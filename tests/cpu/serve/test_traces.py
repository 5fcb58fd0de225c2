"""OpenTelemetry spans: attributes, continued traces, a collector that works, one that is dead, and no package."""

from __future__ import annotations

import http.server
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from quire.core.errors import ConfigError
from quire.serve.config import ServerConfig
from quire.serve.ops.traces import Traces

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
BODY = {"model": "fake", "prompt": [5, 6, 7], "max_tokens": 4}


def ask(server: Any, path: str = "/v1/completions", headers: dict[str, str] | None = None, **fields: Any) -> Any:
    return httpx.post(server.base + path, json={**BODY, **fields}, headers=headers, timeout=60)


def spans_of(server: Any, exporter: InMemorySpanExporter, n: int = 1) -> list[Any]:
    """The next spans, once `n` are there."""
    for _ in range(100):
        server.state.traces._provider.force_flush()
        if len(exporter.get_finished_spans()) >= n:
            break
        time.sleep(0.02)
    found = list(exporter.get_finished_spans())
    exporter.clear()
    assert len(found) == n
    return found


@pytest.fixture
def traced(make_server: Callable[..., Any]) -> tuple[Any, InMemorySpanExporter]:
    server, exporter = make_server(), InMemorySpanExporter()
    server.state.traces = Traces(exporter, "fake")
    return server, exporter


def test_a_request_is_one_span_with_its_times_and_counts(traced: tuple[Any, InMemorySpanExporter]) -> None:
    server, exporter = traced
    answer = ask(server, user="ann", temperature=0.5)
    assert answer.status_code == 200
    [span] = spans_of(server, exporter)
    found = dict(span.attributes)
    assert span.name == "llm_request" and span.kind.name == "SERVER" and span.parent is None
    assert span.resource.attributes["service.name"] == "quire"
    assert span.status.status_code.name == "UNSET" and "error.type" not in found
    seconds = {name.removeprefix("gen_ai.latency."): found.pop(name) for name in list(found) if ".latency." in name}
    assert seconds["e2e"] == pytest.approx(seconds["time_in_queue"] + seconds["time_in_model_inference"], abs=1e-6)
    assert seconds["e2e"] == pytest.approx(seconds["time_to_first_token"] + seconds["time_in_model_decode"], abs=1e-6)
    assert seconds["time_to_first_token"] >= seconds["time_in_model_prefill"] >= 0
    assert abs((span.end_time - span.start_time) / 1e9 - seconds["e2e"]) < 1.0
    assert found == {
        "gen_ai.operation.name": "text_completion", "gen_ai.request.model": "fake", "gen_ai.response.model": "fake",
        "gen_ai.request.id": answer.headers["x-request-id"], "http.route": "/v1/completions", "gen_ai.request.n": 1,
        "gen_ai.request.temperature": 0.5, "gen_ai.request.top_p": 1.0, "gen_ai.request.max_tokens": 4,
        "gen_ai.usage.num_sequences": 1, "gen_ai.usage.input_tokens": 3, "gen_ai.usage.output_tokens": 4,
        "gen_ai.usage.prompt_tokens": 3, "gen_ai.usage.completion_tokens": 4,
        "gen_ai.usage.cache_read.input_tokens": 0, "gen_ai.response.finish_reasons": ("length",),
    }  # fmt: skip
    assert ask(server, prompt=[[5], [6], [7, 8]], n=2).status_code == 200
    [span] = spans_of(server, exporter)
    assert span.attributes["gen_ai.usage.num_sequences"] == 6 and span.attributes["gen_ai.usage.input_tokens"] == 4


def test_endpoints_and_streams(traced: tuple[Any, InMemorySpanExporter]) -> None:
    server, exporter = traced
    messages = [{"role": "user", "content": "x"}]
    for stream in (False, True):
        httpx.post(
            server.base + "/v1/chat/completions", json={"model": "fake", "messages": messages, "stream": stream}
        ).read()
        [span] = spans_of(server, exporter)
        assert span.attributes["gen_ai.operation.name"] == "chat" and span.attributes["gen_ai.usage.output_tokens"] > 0
    assert ask(server, max_tokens=0).status_code == 400
    server.engine.fault = lambda request: True
    assert ask(server).status_code == 500
    [span] = spans_of(server, exporter)
    assert span.attributes["error.type"] == "sequence_fault" and span.status.status_code.name == "ERROR"
    assert "gen_ai.latency.e2e" not in span.attributes


def test_a_client_that_leaves_is_no_error_of_ours(traced: tuple[Any, InMemorySpanExporter]) -> None:
    server, exporter = traced
    server.engine.delay_s = 0.05
    with httpx.stream("POST", server.base + "/v1/completions", json={**BODY, "max_tokens": 400, "stream": True}) as one:
        next(one.iter_lines())
    [span] = spans_of(server, exporter)
    assert span.attributes["error.type"] == "cancelled" and span.status.status_code.name == "UNSET"


def test_the_clients_trace_is_continued(traced: tuple[Any, InMemorySpanExporter]) -> None:
    server, exporter = traced
    ask(server, headers={"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01", "tracestate": "shop=7"})
    [span] = spans_of(server, exporter)
    assert f"{span.context.trace_id:032x}" == TRACE_ID and f"{span.parent.span_id:016x}" == PARENT_ID
    assert span.context.trace_state["shop"] == "7"
    for bad in ("", "x" * 600, f"00-{TRACE_ID}-{'0' * 16}-01", f"ff-{TRACE_ID}-{PARENT_ID}-01", "00-é-1-01"):
        assert ask(server, headers={"traceparent": bad.encode("latin-1"), "tracestate": "=" * 9000}).status_code == 200
        [span] = spans_of(server, exporter)
        assert span.parent is None and f"{span.context.trace_id:032x}" != TRACE_ID
    ask(server, headers={"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-00"})
    spans_of(server, exporter, 0)  # the client says that this trace is not sampled


class Collector(http.server.BaseHTTPRequestHandler):
    """Takes OTLP over HTTP."""

    received: list[Any]
    gate: threading.Event

    def do_POST(self) -> None:
        self.gate.wait(20)
        data = self.rfile.read(int(self.headers["content-length"]))
        self.received.append((self.path, ExportTraceServiceRequest.FromString(data)))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[Any]:
    """(URL, what was received, an event that lets it answer)."""
    kind = type("OneCollector", (Collector,), {"received": [], "gate": threading.Event()})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), kind)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1/traces", kind.received, kind.gate
    kind.gate.set()
    server.shutdown()
    server.server_close()


def test_spans_reach_a_collector_over_http(make_server: Callable[..., Any], collector: Any) -> None:
    url, received, gate = collector
    gate.set()
    server = make_server(otlp_traces_endpoint=url)
    for _ in range(3):
        ask(server)
    server.call(server.state.traces.close)  # as the end of the server does: what waits is sent
    spans = [s for _, batch in received for r in batch.resource_spans for scope in r.scope_spans for s in scope.spans]
    assert {path for path, _ in received} == {"/v1/traces"} and [span.name for span in spans] == ["llm_request"] * 3
    keys = {attribute.key for attribute in spans[0].attributes}
    assert {"gen_ai.usage.input_tokens", "gen_ai.latency.time_in_queue"} <= keys


@pytest.mark.parametrize("kind", ["silent", "dead"])
def test_a_bad_collector_delays_and_fails_nothing(
    make_server: Callable[..., Any], collector: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")  # so that the exporter is stuck at once
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "16")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "8")
    url = collector[0] if kind == "silent" else "http://127.0.0.1:9/v1/traces"
    server = make_server(otlp_traces_endpoint=url)
    processor = server.state.traces._provider._active_span_processor._span_processors[0]._batch_processor
    slowest_s = 0.0
    with server.client() as client:
        for _ in range(32):
            began_s = time.monotonic()
            assert client.post("/v1/completions", json=BODY).status_code == 200
            slowest_s = max(slowest_s, time.monotonic() - began_s)
    assert slowest_s < 5.0
    assert len(processor._queue) == 16, "the exporter hangs, and the queue is bounded"
    began_s = time.monotonic()
    server.call(server.state.traces.close)
    assert time.monotonic() - began_s < 8.0


@pytest.mark.parametrize(
    "url", ["localhost:4317", "grpc://localhost:4317", "http://localhost:4318", "http:///v1/traces", "http://[x/v1"]
)
def test_what_is_no_url_is_said_at_once(url: str) -> None:
    with pytest.raises(ConfigError, match=r"otlp_traces_endpoint = .* must be"):
        ServerConfig(otlp_traces_endpoint=url).verify()


def test_without_the_package_it_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("opentelemetry.exporter")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter", None)
    ServerConfig().verify()
    with pytest.raises(ConfigError, match=r"pip install opentelemetry-sdk opentelemetry"):
        ServerConfig(otlp_traces_endpoint="http://localhost:4318/v1/traces").verify()
