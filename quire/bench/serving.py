"""`bench serve`: a load against a running server and the field's metrics of it (TTFT, TPOT, ITL, E2EL, goodput)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from quire.bench.client import ClientTrace, CompletionsClient, check_base_url, first_model, open_session
from quire.bench.datasets import WARM_UP
from quire.bench.explained import Explained, explained
from quire.bench.loadgen import arrival_offsets_s, counted, run_load
from quire.bench.options import ServeBenchOptions
from quire.bench.summary import PERCENTILES, percentile, summary
from quire.core import env
from quire.core.errors import ConfigError, EngineError, shown

METRICS = ("ttft", "tpot", "itl", "e2el")
LIMITED = ("ttft", "tpot", "e2el")
"""Metrics that have one value a request, so that goodput can limit them."""


@dataclasses.dataclass(slots=True)
class ServingRun:
    """All traces of a timed run, in request order."""

    traces: list[ClientTrace]
    duration_s: float
    model: str
    explained: Explained
    """What the server's model of time expected of some of them."""


def parse_goodput(limits: Sequence[str]) -> dict[str, float]:
    """`["ttft:200", "tpot:50"]` → limits in ms by metric. ConfigError for another form, metric or value."""
    parsed = {}
    for text in limits:
        name, _, value = text.partition(":")
        try:
            limit_ms = float(value)
        except ValueError:
            limit_ms = 0.0
        if name not in LIMITED or not limit_ms > 0:
            raise ConfigError(f"--goodput {shown(text)}: write metric:milliseconds, metric being {', '.join(LIMITED)}")
        parsed[name] = limit_ms
    return parsed


async def measure_serving(options: ServeBenchOptions) -> ServingRun:
    """Wait for the server, warm up, run the load. EngineError if the server does not answer a single request."""
    base_url = check_base_url(options.base_url)
    requests = options.dataset(options.vocab_size, options.seed)
    timed = requests(0)
    offsets_s = arrival_offsets_s(len(timed), options.request_rate, options.burstiness, options.seed)
    fields: dict[str, object] = {"temperature": options.temperature}
    if options.ignore_eos:
        fields["ignore_eos"] = True
    async with open_session(options.api_key or env.read("QUIRE_API_KEY")) as session:
        served = await first_model(session, base_url, options.ready_check_timeout_sec)
        client = CompletionsClient(session, base_url + options.endpoint, options.model or served, fields)
        for request in requests(WARM_UP)[: options.num_warmups]:
            trace = await client.complete(request)
            if trace.error:
                raise EngineError(f"the warm-up request failed: {trace.error}")
        with counted(len(timed)) as on_done:
            traces, duration_s = await run_load(timed, client.complete, offsets_s, options.max_concurrency, on_done)
        return ServingRun(traces, duration_s, client.model, await explained(session, base_url, traces))


def serving_metrics(
    traces: Sequence[ClientTrace],
    duration_s: float,
    percentiles: Sequence[float] = PERCENTILES,
    goodput: dict[str, float] | None = None,
) -> dict[str, object]:
    """Metrics under vLLM's names; latencies in ms over the requests that succeeded, rates a second of the run.

    `p99_start_lag_ms` is how late requests were sent: the client was too slow, or --max-concurrency held them back.
    """
    good = [trace for trace in traces if not trace.error]
    values_s: dict[str, list[float]] = {
        "ttft": [trace.ttft_s for trace in good],
        "tpot": [trace.tpot_s for trace in good if trace.tpot_s is not None],
        "itl": [gap_s for trace in good for gap_s in trace.itl_s],
        "e2el": [trace.e2el_s for trace in good],
    }
    n_input, n_output = sum(trace.n_input for trace in good), sum(trace.n_output for trace in good)
    result: dict[str, object] = {
        "duration": duration_s,
        "completed": len(good),
        "failed": len(traces) - len(good),
        "total_input_tokens": n_input,
        "total_output_tokens": n_output,
        "request_throughput": len(good) / duration_s,
        "output_throughput": n_output / duration_s,
        "total_token_throughput": (n_input + n_output) / duration_s,
        "n_without_usage": sum(not trace.has_usage for trace in good),
        "p99_start_lag_ms": percentile([1000 * (t.start_s - t.scheduled_s) for t in traces], 99),
        "errors": sorted({trace.error for trace in traces if trace.error})[:5],
    }
    if goodput:
        result["request_goodput"] = sum(_meets(trace, goodput) for trace in good) / duration_s
    for name in METRICS:
        result |= summary(f"{name}_ms", [1000 * value_s for value_s in values_s[name]], percentiles)
    return result


def _meets(trace: ClientTrace, limits_ms: dict[str, float]) -> bool:
    """True if the request is within every limit; one token has no TPOT and meets any."""
    measured = {"ttft": trace.ttft_s, "tpot": trace.tpot_s or 0.0, "e2el": trace.e2el_s}
    return all(1000 * measured[name] <= limit_ms for name, limit_ms in limits_ms.items())
