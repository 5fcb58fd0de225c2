"""The time of a step from shapes alone: the roofline, max(bytes / bandwidth, FLOPs / rate), plus a constant.

Williams et al. 2009, "Roofline". A lower bound for a well-made engine: no launch gaps, no imbalance, perfect overlap of
traffic and arithmetic. Drives the clock of the null device and the share of the limit in `quire bench`.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

from quire.config.arch import ModelArch
from quire.core.plan import Spans
from quire.planner.hardware import Hardware
from quire.planner.shape import head_weights, kv_numbers_per_token, pair_flops, read_weights, spared_flops, state_bytes


@dataclasses.dataclass(frozen=True, slots=True)
class StepWork:
    """What a step moves and computes at least."""

    n_bytes: float
    n_flops: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Cost of steps of one model on one device."""

    arch: ModelArch
    hardware: Hardware
    weight_itemsize: float = 2
    """Bytes a weight of the layers, scales of quantised ones counted in."""
    head_itemsize: float = 2
    """Bytes a weight of the output head."""
    kv_itemsize: float = 2
    """Bytes a number in the KV cache, scales counted in."""
    windows: tuple[int, ...] = ()
    """Keys that a row sees in each layer, 0: all before it; empty: all in every layer."""
    page_size: int = 0
    """Tokens a page, for prefixes that are read once."""

    def work(self, spans: Spans, shared_prefixes: Sequence[tuple[list[int], int]] = ()) -> StepWork:
        """Bytes (weights once, of experts those chosen, K/V and recurrent states read and written) and FLOPs (matrices,
        attention, head for wanted tokens).

        shared_prefixes: (slots, leading pages), as in `StepPlan`; each is read once, in layers without a window.
        """
        arch = self.arch
        n_tokens, n_wants = sum(spans.lengths), sum(spans.wants)
        n_shared = sum((len(slots) - 1) * n_pages for slots, n_pages in shared_prefixes) * self.page_size
        n_read, n_pairs = 0.0, 0.0  # means over the layers
        for window, n_layers in collections.Counter(self.windows or (0,)).items():
            share = n_layers / len(self.windows or (0,))
            read, pairs = _seen(spans, n_tokens, window)
            n_read += share * (read - (0 if window else n_shared))
            n_pairs += share * pairs
        body, head = arch.n_layers * read_weights(arch, 1), head_weights(arch)
        read = arch.n_layers * read_weights(arch, n_tokens)
        weights_bytes = read * self.weight_itemsize + (head * self.head_itemsize if n_wants else 0)
        kv_bytes = (n_read + n_tokens) * kv_numbers_per_token(arch) * self.kv_itemsize
        n_fresh = spans.starts.count(0)  # which begin with a state of zeros
        kv_bytes += (2 * len(spans) - n_fresh) * state_bytes(arch)  # read and written
        attention = pair_flops(arch) * n_pairs - spared_flops(arch, spans.starts, spans.lengths)
        return StepWork(weights_bytes + kv_bytes, 2 * body * n_tokens + 2 * head * n_wants + attention)

    def limit_s(self, work: StepWork) -> float:
        """Seconds that the device needs at least."""
        return max(work.n_bytes / self.hardware.bandwidth_bytes_per_s, work.n_flops / self.hardware.flops_per_s)

    def step_s(self, spans: Spans) -> float:
        """Seconds of one step with these spans, what nothing hides included."""
        return self.limit_s(self.work(spans)) + self.hardware.step_overhead_s


def _seen(spans: Spans, n_tokens: int, window: int) -> tuple[float, float]:
    """(tokens whose K/V a span attends to, once a span; pairs of a row and a key that it sees), of one layer."""
    columns = zip(spans.starts, spans.lengths, strict=True)
    if not window:
        return sum(spans.starts) + n_tokens, sum(n * (start + (n + 1) / 2) for start, n in columns)
    n_read, n_pairs = 0, 0.0
    for start, n in columns:
        n_whole = min(max(window - start, 0), n)  # rows that see everything before them
        n_read += min(start + n, window + n - 1)
        n_pairs += n_whole * (start + (n_whole + 1) / 2) + (n - n_whole) * window
    return n_read, n_pairs
