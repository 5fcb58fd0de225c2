"""The physical side of an offline benchmark: ceilings of the device, limits of recorded steps, captured steps.

Owns the order: probe, load and time, probe again on a CPU, then profile. Does not own the arithmetic (`limit.py`,
`breakdown.py`) nor the recording (`profiling.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from quire.bench.breakdown import Breakdown, Capture, breakdown
from quire.bench.ceilings import higher, probe
from quire.bench.kernels.timing import timer
from quire.bench.limit import ceilings_line, step_limits_s
from quire.bench.profiling import capture
from quire.bench.trace import write_trace
from quire.config.arch import ModelArch
from quire.config.engine import EngineConfig
from quire.config.resolve import NOT_ROUNDED, resolve
from quire.engine.build import device_of
from quire.engine.capacity import kv_itemsize
from quire.engine.step_record import StepRecord
from quire.kernels.qgemm import SCHEMES
from quire.planner.cost import CostModel


class View:
    """To be made before the engine is loaded: the probe of a GPU wants its memory."""

    def __init__(self, config: EngineConfig, arch: ModelArch) -> None:
        """config: on a real device. Sets the number of threads, as the engine will."""
        self._device = device_of(config)
        limits = resolve(config, arch, self._device)
        dtype = getattr(torch, limits.dtype)
        self._timer = timer(self._device)
        self._dtypes = [dtype] if config.quantization in NOT_ROUNDED else [dtype, torch.int8]
        quantized = SCHEMES.get(config.quantization)
        itemsize = dtype.itemsize if quantized is None else quantized.bytes_per_weight
        self.cost = CostModel(
            arch=arch,
            hardware=probe(self._timer, self._dtypes),
            weight_itemsize=itemsize,
            head_itemsize=itemsize,
            kv_itemsize=kv_itemsize(limits, arch),
            windows=arch.windows,
            page_size=config.block_size,
        )
        self._captures: list[Capture] = []

    def probe_again(self) -> None:
        """A second look, once the timed runs are over, at a CPU, whose speed drifts."""
        if self._device == "cpu":
            again = higher(self.cost.hardware, probe(self._timer, self._dtypes))
            self.cost = dataclasses.replace(self.cost, hardware=again)

    def limits_s(self, records: Sequence[StepRecord]) -> list[float]:
        """The least seconds of each step."""
        return step_limits_s(self.cost, records)

    def profile(self, llm: Any, run: Callable[[], object], n_steps: int) -> Breakdown:
        """Where the time goes in the middle of a pass of `n_steps` steps (see `profiling.capture`)."""
        self._captures.append(capture(llm, run, n_steps, self._device))
        return breakdown(self._captures[-1])

    def write_trace(self, path: str, title: str) -> None:
        """All that was profiled, as a Chrome trace."""
        write_trace(path, self._captures, title)

    def ceilings(self) -> dict[str, object]:
        """For the report."""
        hardware = self.cost.hardware
        return {
            "device": hardware.name,
            "read_bytes_per_second": hardware.bandwidth_bytes_per_s,
            "flops_per_second": hardware.flops_per_s,
            "products": self._products(),
        }

    def line(self) -> str:
        """For people."""
        return ceilings_line(self.cost.hardware, self._products())

    def _products(self) -> str:
        return " or ".join(str(dtype).removeprefix("torch.") for dtype in self._dtypes)
