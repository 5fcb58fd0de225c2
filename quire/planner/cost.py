"""The time of a step from shapes alone: the roofline, max(bytes / bandwidth, FLOPs / rate), plus a constant.

Williams et al. 2009, "Roofline". A lower bound for a well-made engine: no launch gaps, no imbalance, perfect overlap of
traffic and arithmetic. Drives the clock of the null device.
"""

from __future__ import annotations

import dataclasses

from quire.core.plan import Spans
from quire.planner.hardware import Hardware
from quire.planner.shape import Shape, head_weights, kv_numbers_per_token, layer_weights


@dataclasses.dataclass(frozen=True, slots=True)
class StepWork:
    """What a step moves and computes."""

    n_bytes: float
    n_flops: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Cost of steps of one model on one device."""

    shape: Shape
    hardware: Hardware
    weight_itemsize: int = 2
    """Bytes a weight."""
    kv_itemsize: int = 2
    """Bytes a number in the KV cache."""

    def work(self, spans: Spans) -> StepWork:
        """Bytes (weights once, K/V read and written) and FLOPs (matrices, attention, head for wanted tokens)."""
        shape = self.shape
        n_tokens, n_wants = sum(spans.lengths), sum(spans.wants)
        n_read = sum(spans.starts) + n_tokens  # tokens whose K/V a span attends to, once a span
        n_pairs = sum(n * (start + (n + 1) / 2) for start, n in zip(spans.starts, spans.lengths, strict=True))
        body, head = shape.n_layers * layer_weights(shape), head_weights(shape)
        weights_bytes = (body + (head if n_wants else 0)) * self.weight_itemsize
        kv_bytes = (n_read + n_tokens) * kv_numbers_per_token(shape) * self.kv_itemsize
        attention = 4 * shape.n_layers * shape.n_heads * shape.head_dim * n_pairs
        return StepWork(weights_bytes + kv_bytes, 2 * body * n_tokens + 2 * head * n_wants + attention)

    def step_s(self, spans: Spans) -> float:
        """Seconds of one step with these spans."""
        work, hardware = self.work(spans), self.hardware
        bound = max(work.n_bytes / hardware.bandwidth_bytes_per_s, work.n_flops / hardware.flops_per_s)
        return bound + hardware.step_overhead_s
