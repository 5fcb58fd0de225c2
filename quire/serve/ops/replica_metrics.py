"""Families of /metrics about several replicas: what each holds of prefixes, and how right that was.

Owns their names. Does not own the figures (`engine/replicas/chooser`).
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from quire.core.events import EngineStats


def families(model_name: str, stats: EngineStats) -> Iterator[Metric]:
    """Empty for a single engine."""
    routing = stats.routing
    if routing is None:
        return
    gauges = {
        "replica_num_seqs_open": ("Sequences that were sent to a replica and have not ended.", "n_open"),
        "replica_prefix_pages": ("Pages of prefixes that a replica has said it holds.", "prefix_pages"),
        "replica_prefix_pages_coming": ("Pages sent to a replica that it has not said yet it holds.", "coming_pages"),
        "replica_prefixes_known": ("1: a replica says what it holds; 0: what was sent counts.", "is_known"),
    }
    for name, (meaning, field) in gauges.items():
        gauge = GaugeMetricFamily(f"quire:{name}", meaning, labels=["model_name", "replica"])
        for replica in routing.replicas:
            gauge.add_metric([model_name, replica.name], float(getattr(replica, field)))
        yield gauge
    counters = {
        "routing_expected_tokens": ("Prompt tokens that chosen replicas should have had.", routing.expected_tokens),
        "routing_found_tokens": ("Prompt tokens that chosen replicas had.", routing.found_tokens),
        "routing_missed_tokens": ("Of the tokens expected, those not found.", routing.missed_tokens),
        "routing_pictures": ("Times that a replica said anew all that it holds.", routing.pictures),
        "routing_gaps": ("Times that something of what a replica said was lost.", routing.gaps),
    }
    for name, (meaning, count) in counters.items():
        counter = CounterMetricFamily(f"quire:{name}", meaning, labels=["model_name"])
        counter.add_metric([model_name], count)
        yield counter
