"""The physical side of an offline benchmark: ceilings of the device, limits of recorded steps, captured steps.

Owns the order: probe, load and time, probe again on a CPU, then profile. Does not own the arithmetic (`limit.py`,
`breakdown.py`) nor the recording (`profiling.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from quire.bench.breakdown import Breakdown, Capture, breakdown
from quire.bench.ceilings import higher, probe
from quire.bench.kernels.timing import timer
from quire.bench.limit import Case, ceilings_line, part_limits_ms, step_limits_s
from quire.bench.profiling import capture
from quire.bench.trace import write_trace
from quire.config.arch import ModelArch
from quire.config.engine import EngineConfig
from quire.config.mesh import Mesh, mesh_of
from quire.config.resolve import NOT_ROUNDED, resolve
from quire.engine.build import device_of
from quire.engine.expert_load import Loads
from quire.engine.step_record import StepRecord
from quire.planner.accelerators import USUAL_CPU, accelerator_seen, host_accelerator
from quire.planner.engine_cost import engine_formats


class View:
    """To be made before the engine is loaded: the probe of a GPU wants its memory."""

    def __init__(self, config: EngineConfig, arch: ModelArch) -> None:
        """config: on a real device. Sets the number of threads, as the engine will."""
        self._device = device_of(config)
        limits = resolve(config, arch, self._device)
        dtype = getattr(torch, limits.dtype)
        self._timer = timer(self._device)
        may_be_integers = arch.codings is not None or config.quantization not in NOT_ROUNDED
        self._dtypes = [dtype, torch.int8] if may_be_integers else [dtype]
        self._found = probe(self._timer, self._dtypes)
        accelerator = accelerator_seen(self._found.device)
        self._link_bytes_per_s = 0.0 if accelerator is None else accelerator.link_bytes_per_s
        kept_by = host_accelerator(USUAL_CPU) if self._device == "cpu" else accelerator
        formats = engine_formats(config, limits, arch, kept_by)
        mesh = mesh_of(config)
        mesh = mesh if mesh.dp == 1 else Mesh()  # a step is of all data-parallel ranks together
        self._case = Case(arch=arch, formats=formats, page_size=config.block_size, mesh=mesh)
        self._captures: list[Capture] = []

    def probe_again(self) -> None:
        """A second look, once the timed runs are over, at a CPU, whose speed drifts."""
        if self._device == "cpu":
            self._found = higher(self._found, probe(self._timer, self._dtypes))

    def limits_s(self, records: Sequence[StepRecord], loads: Loads) -> list[float]:
        """The least seconds of each step. loads: of the experts meanwhile."""
        return step_limits_s(self._case.counted(loads), self._found, records)

    def profile(self, llm: Any, run: Callable[[], object], n_steps: int, loads: Loads) -> Breakdown:
        """Where the time goes in the middle of a pass of `n_steps` steps (see `profiling.capture`). loads: of the
        experts in passes like that."""
        found, case = capture(llm, run, n_steps, self._device), self._case.counted(loads)
        self._captures.append(found)
        return breakdown(found, part_limits_ms(case, self._found, found.steps, self._link_bytes_per_s))

    def write_trace(self, path: str, title: str) -> None:
        """All that was profiled, as a Chrome trace."""
        write_trace(path, self._captures, title)

    def ceilings(self) -> dict[str, object]:
        """For the report."""
        return {
            "device": self._found.device,
            "read_bytes_per_second": self._found.read_bytes_per_s,
            "flops_per_second": max(self._found.flops_per_s.values()),
            "products": self._products(),
        }

    def line(self) -> str:
        """For people."""
        return ceilings_line(self._found, self._products())

    def _products(self) -> str:
        return " or ".join(str(dtype).removeprefix("torch.") for dtype in self._dtypes)
