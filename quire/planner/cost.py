"""The time of a step from shapes alone: its limit, and with a calibration what it is expected to take.

The limit is the roofline, max(bytes / bandwidth, FLOPs / rate) (Williams et al. 2009): no launch gaps, no imbalance,
perfect overlap. The expectation is `timing`. Both drive clocks of the null device; the limit alone is the share of the
limit in `quire bench`.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

from quire.config.arch import ModelArch
from quire.core.plan import Spans
from quire.planner.accelerators import Accelerator, calibration_for
from quire.planner.calibration import Calibration
from quire.planner.formats import Formats
from quire.planner.hardware import Hardware
from quire.planner.links import Links
from quire.planner.mesh import Mesh
from quire.planner.operators import seen
from quire.planner.shape import head_weights, kv_numbers_per_token, pair_flops, read_weights, spared_flops, state_bytes
from quire.planner.timing import StepTimer


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
    timer: StepTimer | None = None
    """What steps are expected to take; None: `step_s` is the limit and a constant."""

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
            found = seen(spans.starts, spans.lengths, window)
            n_read += share * (found.n_read - (0 if window else n_shared))
            n_pairs += share * found.n_pairs
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

    def step_s(self, spans: Spans, shared_prefixes: Sequence[tuple[list[int], int]] = ()) -> float:
        """Seconds of one step with these spans, what nothing hides included: of the device, or of the host beside it
        where that takes longer. shared_prefixes: as in `work`."""
        timer = self.timer
        if timer is None:
            return self.limit_s(self.work(spans, shared_prefixes)) + self.hardware.step_overhead_s
        n_shared = sum(len(slots) * n_pages for slots, n_pages in shared_prefixes) * self.page_size
        host_s = timer.calibration.host_s + len(spans) * timer.calibration.host_row_s
        return max(host_s, timer.step_s(spans, n_shared, n_shared))

    @property
    def first_token_s(self) -> float:
        """What a request's first token waits beside steps."""
        return 0.0 if self.timer is None else self.timer.calibration.first_token_s


def calibrated(
    arch: ModelArch,
    device: Accelerator,
    *,
    formats: Formats | None = None,
    mesh: Mesh | None = None,
    calibration: Calibration | None = None,
    page_size: int = 16,
) -> CostModel:
    """The cost of steps of a model on a device, or on a mesh of them, as measured there; where nobody has measured
    (`Calibration.source` says so), as assumed."""
    formats, mesh = formats or Formats(), mesh or Mesh()
    found = calibration or calibration_for(device)
    links: Links | None = device.links if mesh.n_devices > mesh.dp or mesh.ep > 1 else None
    itemsize = formats.weights.n_bytes(1 << 14, 1 << 14) / (1 << 28)
    hardware = Hardware(device.name, found.read_bytes_per_s, found.flops_per_s["bfloat16"], found.step_s)
    return CostModel(
        arch=arch, hardware=hardware, weight_itemsize=itemsize, head_itemsize=itemsize,
        kv_itemsize=formats.kv_itemsize(arch.head_dim), windows=arch.windows, page_size=page_size,
        timer=StepTimer(arch, found, formats, mesh, links),
    )  # fmt: skip
