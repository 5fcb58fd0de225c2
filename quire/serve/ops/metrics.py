"""Prometheus metrics: vLLM's names under the prefix `quire:`. Owns histograms of request times and /metrics' text.

Gauges and token counters come from the engine's last `EngineStats`. Invariants: label values are from closed sets;
counters only grow; a scrape walks no request.
"""

from __future__ import annotations

import asyncio
import bisect
import itertools
import time
from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from quire.core.events import EngineStats, FinishReason
from quire.core.outputs import RequestMetrics
from quire.serve.ops import expert_metrics, replica_metrics
from quire.serve.ops.loop_monitor import Lag
from quire.serve.ops.metric_files import MetricFiles, ProcessCounts

TTFT_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0,
)  # fmt: skip
ITL_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 40.0,
)  # fmt: skip
E2E_BUCKETS = (
    0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 60.0, 120.0, 240.0, 480.0,
    960.0,
)  # fmt: skip
TOKEN_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
LAG_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
LAG_CAUSES = ("any", "loop", "interpreter")
METHODS = ("GET", "HEAD", "POST", "OPTIONS", "PUT", "DELETE", "PATCH")


class Histogram:
    """Counts by bucket; `observe` is a bisection and two additions."""

    def __init__(self, name: str, meaning: str, bounds: Iterable[float]) -> None:
        self.name = name
        self.meaning = meaning
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count `value`, `times` times."""
        self._counts[bisect.bisect_left(self._bounds, value)] += times
        self._sum += value * times

    @property
    def counts(self) -> tuple[list[int], float]:
        """Counts by bucket, and the sum of the values."""
        return list(self._counts), self._sum

    def add(self, counts: list[int], total: float) -> None:
        """Count what another one has counted."""
        if len(counts) == len(self._counts):
            self._counts = [mine + other for mine, other in zip(self._counts, counts, strict=True)]
            self._sum += total

    def family(self, model_name: str, others: Iterable[ProcessCounts]) -> HistogramMetricFamily:
        """The histogram in Prometheus' form, with what other processes have counted."""
        whole = Histogram(self.name, self.meaning, self._bounds)
        for counts, total in (self.counts, *(other.histograms.get(self.name, ([], 0.0)) for other in others)):
            whole.add(counts, total)
        family = HistogramMetricFamily(f"quire:{self.name}", self.meaning, labels=["model_name"])
        family.add_metric([model_name], whole.buckets(), whole._sum)
        return family

    def buckets(self) -> list[tuple[str, float]]:
        """Upper bound → how many values are not above it, as Prometheus has it."""
        names = [*(repr(float(bound)) for bound in self._bounds), "+Inf"]
        return list(zip(names, itertools.accumulate(self._counts), strict=True))


class LoopLags:
    """How late the event loop of each API process came round, by cause (`loop_monitor.py`)."""

    def __init__(self) -> None:
        self._own = {cause: Histogram("event_loop_lag_seconds", "", LAG_BUCKETS) for cause in LAG_CAUSES}
        self._worst_s = dict.fromkeys(LAG_CAUSES, 0.0)

    def note(self, lag: Lag) -> None:
        """One beat of the monitor's timer."""
        for cause, seconds in zip(LAG_CAUSES, (lag.late_s, lag.loop_s, lag.interpreter_s), strict=True):
            self._own[cause].observe(seconds)
            if seconds > self._worst_s[cause]:
                self._worst_s[cause] = seconds

    def counts(self) -> dict[str, tuple[list[int], float, float]]:
        """Cause → counts by bucket, sum, and the largest value."""
        return {cause: (*self._own[cause].counts, self._worst_s[cause]) for cause in LAG_CAUSES}

    def add(self, counts: dict[str, tuple[list[int], float, float]]) -> None:
        """Go on from what another one has counted."""
        for cause, (buckets, total, worst_s) in counts.items():
            self._own[cause].add(buckets, total)
            self._worst_s[cause] = max(self._worst_s[cause], worst_s)

    def families(self, index: int, others: Iterable[ProcessCounts]) -> Iterator[Metric]:
        """The two families, with a series for each process and cause."""
        labels = ["process", "cause"]
        whole = HistogramMetricFamily(
            "quire:event_loop_lag_seconds",
            "Seconds by which the event loop came round too late: all, its own work, behind other threads.",
            labels=labels,
        )
        worst = GaugeMetricFamily(
            "quire:event_loop_lag_max_seconds", "The largest of these since the process began.", labels=labels
        )
        for process, counts in ((index, self.counts()), *((other.process, other.loop) for other in others)):
            for cause, (buckets, total, worst_s) in counts.items():
                histogram = Histogram("", "", LAG_BUCKETS)
                histogram.add(buckets, total)
                whole.add_metric([str(process), cause], histogram.buckets(), total)
                worst.add_metric([str(process), cause], worst_s)
        yield whole
        yield worst


class Metrics:
    """All metrics of one server."""

    def __init__(self) -> None:
        self.model_name = ""
        self.max_adapters = 0
        """Most different ones in a step."""
        self.stats = EngineStats()
        self.ttft = Histogram("time_to_first_token_seconds", "Seconds from arrival to the first token.", TTFT_BUCKETS)
        self.itl = Histogram("inter_token_latency_seconds", "Seconds between tokens of a stream.", ITL_BUCKETS)
        self.tpot = Histogram(
            "request_time_per_output_token_seconds", "Mean seconds a token after the first, by request.", ITL_BUCKETS
        )
        self.e2e = Histogram("e2e_request_latency_seconds", "Seconds from arrival to the last token.", E2E_BUCKETS)
        self.prompt_len = Histogram("request_prompt_tokens", "Prompt tokens of a request.", TOKEN_BUCKETS)
        self.output_len = Histogram("request_generation_tokens", "Generated tokens of a request.", TOKEN_BUCKETS)
        self.queue = Histogram("request_queue_time_seconds", "Seconds in the queue.", E2E_BUCKETS)
        self.prefill = Histogram(
            "request_prefill_time_seconds", "Seconds from the slot to the first token.", E2E_BUCKETS
        )
        self.decode = Histogram("request_decode_time_seconds", "Seconds from the first to the last token.", E2E_BUCKETS)
        self.inference = Histogram("request_inference_time_seconds", "Seconds with a slot.", E2E_BUCKETS)
        self.params_n = Histogram("request_params_n", "Samples asked for.", (1, 2, 5, 10, 20))
        self.max_tokens = Histogram("request_params_max_tokens", "max_tokens asked for.", TOKEN_BUCKETS)
        self.loop = LoopLags()
        self.engine_restarts = 0
        self.open_streams = 0
        self._index = 0
        self._answers: dict[tuple[str, str, str], int] = {}
        self._lost_clients: dict[str, int] = {}
        self._ignored: dict[str, int] = {}
        self._histograms = (
            *(self.ttft, self.itl, self.tpot, self.e2e, self.prompt_len, self.output_len),
            *(self.queue, self.prefill, self.decode, self.inference, self.params_n, self.max_tokens),
        )
        self._files: MetricFiles | None = None
        self._others: list[ProcessCounts] = []
        self._publishing = asyncio.Lock()
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._process = ProcessCollector(registry=self._registry)

    def share(self, folder: str, index: int) -> None:
        """Count together with other processes of this server; figures of one process would mislead."""
        self._files, self._index = MetricFiles(folder, index), index
        before = self._files.own()
        self.loop.add(before.loop)
        for histogram in self._histograms:
            histogram.add(*before.histograms.get(histogram.name, ([], 0.0)))
        for labels, count in before.answers:
            self._answers[labels] = self._answers.get(labels, 0) + count
        for route, count in before.lost_clients.items():
            self._lost_clients[route] = self._lost_clients.get(route, 0) + count
        self.count_ignored(before.ignored)
        self._registry.unregister(self._process)

    async def publish(self) -> None:
        """Show the other processes what was counted here, and look at theirs. The files are a thread's work."""
        if self._files is not None:
            async with self._publishing:
                histograms = {histogram.name: histogram.counts for histogram in self._histograms}
                answers, lost = list(self._answers.items()), dict(self._lost_clients)
                counts = ProcessCounts(histograms, answers, lost, self._index, self.loop.counts(), dict(self._ignored))
                self._others = await asyncio.to_thread(self._files.exchange, counts)

    def count_answer(self, route: str, method: str, status: int) -> None:
        """One HTTP answer; `route` is a pattern from the route table, `status` 499 where the client left before it."""
        key = (route, method if method in METHODS else "other", str(status))
        self._answers[key] = self._answers.get(key, 0) + 1

    def count_lost_client(self, route: str) -> None:
        """A client left before its answer, a stream too, was complete; `route` as in `count_answer`."""
        self._lost_clients[route] = self._lost_clients.get(route, 0) + 1

    def count_ignored(self, counts: dict[str, int]) -> None:
        """Fields of a request that do nothing, by names from `http/ignored.COUNTED`."""
        for param, count in counts.items():
            self._ignored[param] = self._ignored.get(param, 0) + count

    def observe_params(self, n: int, max_tokens: int | None) -> None:
        """What a request asked for."""
        self.params_n.observe(n)
        if max_tokens is not None:
            self.max_tokens.observe(max_tokens)

    def observe_request(self, times: RequestMetrics, prompt_len: int, output_len: int) -> None:
        """A request that came to its end."""
        self.prompt_len.observe(prompt_len)
        self.output_len.observe(output_len)
        if times.first_token_s is None or times.finished_s is None:
            return
        self.queue.observe(times.queued_s)
        self.prefill.observe(max(0.0, times.first_token_s - times.arrival_s - times.queued_s))
        self.decode.observe(times.finished_s - times.first_token_s)
        self.inference.observe(max(0.0, times.finished_s - times.arrival_s - times.queued_s))
        self.ttft.observe(times.first_token_s - times.arrival_s)
        self.e2e.observe(times.finished_s - times.arrival_s)
        if output_len > 1:
            self.tpot.observe((times.finished_s - times.first_token_s) / (output_len - 1))

    async def text(self, stats: EngineStats) -> bytes:
        """The text of /metrics. It has a line for each series of each process, and is made in a thread."""
        await self.publish()
        self.stats = stats
        return await asyncio.to_thread(generate_latest, self._registry)

    def describe(self) -> list[Metric]:
        """Nothing is known before the first scrape; tells the registry not to collect at registration."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Called by prometheus_client for each scrape."""
        stats = self.stats
        used = 1.0 - stats.n_pages_free / stats.n_pages if stats.n_pages else 0.0
        yield self._gauge("num_requests_running", "Sequences that run.", stats.n_running)
        yield self._gauge("num_requests_waiting", "Sequences that wait.", stats.n_waiting)
        yield self._gauge("kv_cache_usage_perc", "Share of KV pages that sequences hold, 0 to 1.", used)
        yield self._counter("prompt_tokens", "Prompt tokens of admitted requests.", stats.prompt_tokens)
        yield self._counter("generation_tokens", "Generated tokens.", stats.generation_tokens)
        yield self._counter("computed_tokens", "Tokens that went through the model.", stats.computed_tokens)
        yield self._counter(
            "prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", stats.prefix_queries
        )
        yield self._counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.", stats.prefix_hits)
        yield self._counter("num_preemptions", "Preemptions.", stats.preemptions)
        yield from self._drafts(stats)
        yield from self._data_parallel(stats)
        yield from expert_metrics.families(self.model_name, stats)
        yield from replica_metrics.families(self.model_name, stats)
        if stats.adapters:
            yield self._adapters(stats)
        yield self._counter("engine_steps", "Steps of the engine.", stats.steps)
        yield self._counter("engine_restarts", "Engines that were lost and started again.", self.engine_restarts)
        yield self._gauge("http_requests_live", "Requests of this process that are being answered.", self.open_streams)
        yield self._gauge("num_pages_cached", "KV pages that only the prefix cache holds.", stats.n_pages_cached)
        yield self._gauge("num_pages_saved", "KV pages that sharing saves running sequences.", stats.n_pages_saved)
        yield self._gauge(
            "last_step_age_seconds", "Seconds since a step ended while work waits.", stats.last_step_age_s
        )
        yield self._finished(stats)
        for histogram in self._histograms:
            yield histogram.family(self.model_name, self._others)
        yield self._http()
        yield self._lost()
        yield self._ignored_params()
        yield from self.loop.families(self._index, self._others)

    def _gauge(self, name: str, meaning: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"quire:{name}", meaning, labels=["model_name"])
        family.add_metric([self.model_name], value)
        return family

    def _counter(self, name: str, meaning: str, value: float) -> Metric:
        family = CounterMetricFamily(f"quire:{name}", meaning, labels=["model_name"])
        family.add_metric([self.model_name], value)
        return family

    def _drafts(self, stats: EngineStats) -> Iterator[Metric]:
        """Empty where nothing is drafted."""
        if not stats.accepted_at:
            return
        yield self._counter("spec_decode_num_drafts", "Times that a sequence verified drafts.", stats.n_drafts)
        yield self._counter("spec_decode_num_draft_tokens", "Drafts that were verified.", stats.draft_tokens)
        yield self._counter("spec_decode_num_accepted_tokens", "Drafts that were right.", stats.accepted_tokens)
        saved = "Seconds that drafts saved, or lost below 0, by what steps without them are known to take."
        yield self._gauge("spec_decode_seconds_saved", saved, stats.draft_saved_s)
        family = CounterMetricFamily(
            "quire:spec_decode_num_accepted_tokens_per_pos", "Drafts that were right, by their place.",
            labels=["model_name", "position"],
        )  # fmt: skip
        for place, count in enumerate(stats.accepted_at):
            family.add_metric([self.model_name, str(place)], count)
        yield family

    def _data_parallel(self, stats: EngineStats) -> Iterator[Metric]:
        """Empty where there is one data-parallel rank."""
        if not stats.dp_running:
            return
        n_pages = stats.n_pages / len(stats.dp_running)
        used = [1.0 - n_free / n_pages for n_free in stats.dp_pages_free]
        figures: dict[str, tuple[str, Sequence[float]]] = {
            "dp_num_requests_running": ("Sequences that run on a data-parallel rank.", stats.dp_running),
            "dp_kv_cache_usage_perc": ("Share of its KV pages that sequences hold, 0 to 1.", used),
        }
        for name, (meaning, values) in figures.items():
            family = GaugeMetricFamily(f"quire:{name}", meaning, labels=["model_name", "dp_rank"])
            for dp_rank, value in enumerate(values):
                family.add_metric([self.model_name, str(dp_rank)], value)
            yield family

    def _adapters(self, stats: EngineStats) -> Metric:
        """As vLLM has it: the value is the time, what is said stands in the labels."""
        family = GaugeMetricFamily(
            "quire:lora_requests_info", "Adapters of running and waiting requests.",
            labels=["max_lora", "waiting_lora_adapters", "running_lora_adapters"],
        )  # fmt: skip
        waiting, running = (",".join(names) for names in (stats.waiting_adapters, stats.running_adapters))
        family.add_metric([str(self.max_adapters), waiting, running], time.time())
        return family

    def _finished(self, stats: EngineStats) -> Metric:
        family = CounterMetricFamily(
            "quire:request_success", "Sequences that ended, by reason.", labels=["model_name", "finished_reason"]
        )
        for reason in FinishReason:
            family.add_metric([self.model_name, reason.value], stats.finished.get(reason.value, 0))
        return family

    def _http(self) -> Metric:
        family = CounterMetricFamily("quire:http_requests", "HTTP answers.", labels=["handler", "method", "status"])
        answers = dict(self._answers)
        for other in self._others:
            for labels, count in other.answers:
                answers[labels] = answers.get(labels, 0) + count
        for labels, count in answers.items():
            family.add_metric(labels, count)
        return family

    def _lost(self) -> Metric:
        family = CounterMetricFamily(
            "quire:http_clients_lost", "Clients that left before their answer was complete.", labels=["handler"]
        )
        lost = dict(self._lost_clients)
        for other in self._others:
            for route, count in other.lost_clients.items():
                lost[route] = lost.get(route, 0) + count
        for route, count in lost.items():
            family.add_metric([route], count)
        return family

    def _ignored_params(self) -> Metric:
        family = CounterMetricFamily("quire:ignored_params", "Request fields that were ignored.", labels=["param"])
        ignored = dict(self._ignored)
        for other in self._others:
            for param, count in other.ignored.items():
                ignored[param] = ignored.get(param, 0) + count
        for param, count in ignored.items():
            family.add_metric([param], count)
        return family
