"""OpenTelemetry traces: one span for each request that the engine took. Optional: the extra `otel`.

Owns the span's attributes (GenAI semantic conventions, and vLLM's names where those have none) and the way to the
collector. Does not own the times, which are the engine's. Invariants: without --otlp-traces-endpoint nothing of
OpenTelemetry is imported; a span waits in a bounded queue for a thread of its own, so that a slow or dead collector
delays and fails no request; no text of a request and no name of a user is in a span.
"""

from __future__ import annotations

import asyncio
import importlib.util
import threading
import time
import urllib.parse
from typing import TYPE_CHECKING, Any

from quire.core.errors import ConfigError, shown
from quire.core.outputs import RequestOutput
from quire.core.sampling import SamplingParams
from quire.serve.http.exchange import Exchange

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

PACKAGES = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
SPAN_NAME = "llm_request"
OPERATIONS = {"/v1/completions": "text_completion", "/v1/embeddings": "embeddings"}
MAX_STATE_BYTES = 512
"""Of `tracestate`; a longer one is left out, as the W3C's Trace Context allows."""
CLOSE_S = 1.0
"""Longest wait for the last spans to leave when the server ends."""


def check_endpoint(endpoint: str) -> None:
    """ConfigError unless spans can be sent to this URL, and the packages that send them are installed."""
    try:
        parts = urllib.parse.urlsplit(endpoint)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and len(parts.path) > 1
    except ValueError:
        good = False
    if not good:
        raise ConfigError(
            f"otlp_traces_endpoint = {shown(endpoint)} must be the whole URL under which a collector takes OTLP over "
            "HTTP, such as http://localhost:4318/v1/traces (gRPC, mostly on port 4317, is not spoken)"
        )
    for package in PACKAGES:
        try:
            found = importlib.util.find_spec(package) is not None
        except ModuleNotFoundError:
            found = False
        if not found:
            raise ConfigError(
                f"otlp_traces_endpoint needs the package {package}, which is not installed: pip install"
                " opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"
            )


def open_traces(endpoint: str, model_name: str) -> Traces | None:
    """Where the spans of this process go; None without an endpoint, which `check_endpoint` has passed."""
    if not endpoint:
        return None
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return Traces(OTLPSpanExporter(endpoint), model_name)


class Traces:
    """Makes spans and hands them to a batch processor. The OTEL_* variables of the environment hold."""

    def __init__(self, exporter: SpanExporter, model_name: str) -> None:
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        resource = Resource.create({"service.name": "quire"}).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._propagator = TraceContextTextMapPropagator()
        self.tracer = self._provider.get_tracer("quire.serve")
        self.model_name = model_name

    def context_of(self, exchange: Exchange) -> Any:
        """The trace that the client began, if its `traceparent` is good; else an empty one."""
        from opentelemetry.context import Context

        carrier = {}
        for name in ("traceparent", "tracestate"):
            values = exchange.header(name.encode())
            if len(values) == 1 and len(values[0]) <= MAX_STATE_BYTES:
                carrier[name] = values[0].decode("latin-1")
        return self._propagator.extract(carrier, context=Context())

    def close(self) -> None:
        """Send what waits, for at most `CLOSE_S`."""
        closer = threading.Thread(target=self._provider.shutdown, daemon=True, name="quire-traces-end")
        closer.start()
        closer.join(CLOSE_S)


class RequestTrace:
    """What is noted of one request for its span."""

    def __init__(self, traces: Traces, exchange: Exchange) -> None:
        self._traces = traces
        self._context = traces.context_of(exchange)
        self._began_ns = time.time_ns()
        self._last: RequestOutput | None = None
        self._reasons: list[str] = []
        self._attributes: dict[str, Any] = {
            "gen_ai.operation.name": OPERATIONS.get(exchange.route, "chat"),
            "gen_ai.request.model": traces.model_name,
            "gen_ai.response.model": traces.model_name,
            "gen_ai.request.id": f"req_{exchange.request_id}",
            "http.route": exchange.route,
        }

    def add(self, output: RequestOutput) -> None:
        """One of its prompts came to its end. The times of the last one count: the request took until then."""
        self._last = output
        self._reasons += [part.finish_reason or "" for part in output.outputs]

    def end(self, params: SamplingParams, counts: tuple[int, int, int], error: object) -> None:
        """Make the span. counts: tokens of prompt, of output, and of the prompt from the cache; error: what ended it,
        None for a good end."""
        from opentelemetry.trace import SpanKind, Status, StatusCode

        prompt_tokens, output_tokens, cached_tokens = counts
        self._attributes |= {
            "gen_ai.request.n": params.n,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.usage.num_sequences": len(self._reasons),
            "gen_ai.usage.input_tokens": prompt_tokens,
            "gen_ai.usage.output_tokens": output_tokens,
            "gen_ai.usage.prompt_tokens": prompt_tokens,
            "gen_ai.usage.completion_tokens": output_tokens,
            "gen_ai.usage.cache_read.input_tokens": cached_tokens,
            "gen_ai.response.finish_reasons": self._reasons,
            **self._latencies(),
        }
        if params.max_tokens is not None:
            self._attributes["gen_ai.request.max_tokens"] = params.max_tokens
        if error is not None:
            self._attributes["error.type"] = _error_type(error)
        span = self._traces.tracer.start_span(
            SPAN_NAME, self._context, SpanKind.SERVER, self._attributes, start_time=self._began_ns
        )
        if error is not None and not isinstance(error, asyncio.CancelledError):
            span.set_status(Status(StatusCode.ERROR))
        span.end()

    def _latencies(self) -> dict[str, float]:
        """Seconds, under vLLM's names."""
        times = None if self._last is None else self._last.metrics
        if times is None or times.first_token_s is None or times.finished_s is None:
            return {}
        first_s, all_s = times.first_token_s - times.arrival_s, times.finished_s - times.arrival_s
        found = {
            "time_in_queue": times.queued_s,
            "time_to_first_token": first_s,
            "e2e": all_s,
            "time_in_model_prefill": max(0.0, first_s - times.queued_s),
            "time_in_model_decode": all_s - first_s,
            "time_in_model_inference": max(0.0, all_s - times.queued_s),
        }
        return {f"gen_ai.latency.{name}": value for name, value in found.items()}


def _error_type(error: object) -> str:
    """A code of ours, never a text."""
    if isinstance(error, asyncio.CancelledError):
        return "cancelled"
    code = getattr(error, "code", None)
    return code if isinstance(code, str) else "internal_error"
