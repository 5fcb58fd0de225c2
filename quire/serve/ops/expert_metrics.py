"""Families of /metrics about the experts of a model: how evenly they are chosen, and how evenly ranks have them.

Owns their names. Does not own the figures (`engine/expert_load`).
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from quire.core.events import EngineStats


def families(model_name: str, stats: EngineStats) -> Iterator[Metric]:
    """Empty without experts; those of ranks only where experts move between them."""
    if stats.expert_imbalance:
        family = GaugeMetricFamily(
            "quire:expert_imbalance", "Tokens of a layer's busiest expert over those of its mean one.",
            labels=["model_name"],
        )  # fmt: skip
        family.add_metric([model_name], stats.expert_imbalance)
        yield family
    loads = {layer: load for layer, load in zip(stats.expert_layers, stats.expert_map, strict=True) if any(load)}
    if loads:
        yield from _of_layers(model_name, loads)
    facts = stats.expert_balance
    if facts is None:
        return
    ranks = GaugeMetricFamily(
        "quire:expert_rank_imbalance", "Load of the most loaded rank over the mean one, in the last window.",
        labels=["model_name", "placement"],
    )  # fmt: skip
    for placement, value in (("before", facts.before), ("after", facts.after)):
        ranks.add_metric([model_name, placement], value)
    yield ranks
    counters = {
        "expert_rearrangements": ("Times that experts were rearranged.", facts.n_rearranged),
        "expert_slots_changed": ("Slots of ranks that took another expert.", facts.n_moved),
        "expert_moved_bytes": ("Bytes of experts that rank 0 took.", facts.moved_bytes),
    }
    for name, (meaning, count) in counters.items():
        counter = CounterMetricFamily(f"quire:{name}", meaning, labels=["model_name"])
        counter.add_metric([model_name], count)
        yield counter
    stood = GaugeMetricFamily(
        "quire:expert_rearrangement_seconds", "For which steps stood still for it: in all, at most at once.",
        labels=["model_name", "part"],
    )  # fmt: skip
    for part, value in (("all", facts.last_s), ("longest", facts.longest_s)):
        stood.add_metric([model_name, part], value)
    yield stood


def _of_layers(model_name: str, loads: dict[int, bytes]) -> Iterator[Metric]:
    """loads: of each layer by its number in the model, see `EngineStats.expert_map`; without those that have seen no
    token. Each expert's own load is in /v1/engine: it would be thousands of series."""
    figures: dict[str, tuple[str, list[float]]] = {
        "expert_layer_imbalance": (
            "Tokens of the layer's busiest expert over those of its mean one, at most 16.",
            [max(one) / 16 for one in loads.values()],
        ),
        "expert_layer_idle": (
            "Experts of the layer with less than a sixteenth of the mean one's tokens.",
            [one.count(0) for one in loads.values()],
        ),
    }
    for name, (meaning, values) in figures.items():
        gauge = GaugeMetricFamily(f"quire:{name}", meaning, labels=["model_name", "layer"])
        for layer, value in zip(loads, values, strict=True):
            gauge.add_metric([model_name, str(layer)], value)
        yield gauge
