"""The time of an engine's step from shapes alone: what it is expected to take on a device that was measured.

Owns what of a step the engine adds: prefixes that are read once, and its host beside the device. Does not own the
arithmetic (`timing`) nor the limit that a step is held to (`operators.limit_s`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from quire.config.arch import ModelArch
from quire.config.mesh import Mesh
from quire.core.plan import Spans
from quire.planner.accelerators import Accelerator, calibration_for
from quire.planner.calibration import Calibration
from quire.planner.expert_loads import ExpertLoads
from quire.planner.formats import Formats
from quire.planner.links import Links
from quire.planner.parts import EVEN_LOADS, rank_parts
from quire.planner.timing import StepTimer

SharedPrefixes = Sequence[tuple[list[int], int]]
"""(slots, leading pages), as in `StepPlan`."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Cost of steps of one model on one device."""

    timer: StepTimer
    page_size: int = 16
    """Tokens a page, for prefixes that are read once."""

    def step_s(self, spans: Spans, shared_prefixes: SharedPrefixes = ()) -> float:
        """Seconds of one step with these spans, what nothing hides included: of the device, or of the host beside it
        where that takes longer. Of a pipeline: in one of its stages, each of which computes another step meanwhile."""
        return max(self._host_s(len(spans.slots)), self._device_s(spans, shared_prefixes))

    def ranks_s(self, parts: Sequence[tuple[Spans, SharedPrefixes]]) -> list[float]:
        """The same of each data-parallel rank, whose part of the step may have no spans: it takes no time then. Where
        rows go to experts of other ranks, all wait in each layer for the one that is the last to send its rows."""
        timer, rows = self.timer, [sum(spans.lengths) for spans, _ in parts]
        host_s = self._host_s(sum(len(spans.slots) for spans, _ in parts))
        alone_s = [self._device_s(*part) if n else 0.0 for n, part in zip(rows, parts, strict=True)]
        if not timer.mesh.sends_rows:
            return [max(host_s, one_s) if n else 0.0 for n, one_s in zip(rows, alone_s, strict=True)]
        apart_s = max(one_s - timer.exchanged_s(n, n) for n, one_s in zip(rows, alone_s, strict=True) if n)
        return [max(host_s, apart_s + timer.exchanged_s(max(rows), sum(rows) / len(rows)))] * len(rows)

    def _host_s(self, n_spans: int) -> float:
        return self.timer.calibration.host_s + n_spans * self.timer.calibration.host_row_s

    def _device_s(self, spans: Spans, shared_prefixes: SharedPrefixes) -> float:
        n_shared = 0
        if shared_prefixes:
            n_shared = sum(len(slots) * n_pages for slots, n_pages in shared_prefixes) * self.page_size
        return self.timer.step_s(spans, n_shared, n_shared)

    def round_s(self, spans: Spans, n_steps: float) -> float:
        """Seconds until each of `n_steps` steps like this one is through, and its sequences can have their next one.
        Of a pipeline: a step goes through all stages one after the other, so with fewer steps than stages these wait
        (the bubble of Huang et al. 2019, "GPipe"); with more, steps wait for their turn."""
        return self.step_s(spans) * max(n_steps, self.timer.mesh.pp)

    @property
    def first_token_s(self) -> float:
        """What a request's first token waits beside steps."""
        return self.timer.calibration.first_token_s


def calibrated(
    arch: ModelArch,
    device: Accelerator,
    *,
    formats: Formats | None = None,
    mesh: Mesh | None = None,
    calibration: Calibration | None = None,
    page_size: int = 16,
    loads: ExpertLoads = EVEN_LOADS,
) -> CostModel:
    """The cost of steps of a model on a device, or on a mesh of them, as measured there; where nobody has measured
    (`Calibration.source` says so), as assumed."""
    formats, mesh = formats or Formats(), mesh or Mesh()
    found = calibration or calibration_for(device)
    links: Links | None = device.links if mesh.n_ranks > mesh.dp or mesh.ep > 1 else None
    parts = rank_parts(arch, mesh, formats, loads)
    return CostModel(timer=StepTimer(arch, found, formats, mesh, links, parts), page_size=page_size)
