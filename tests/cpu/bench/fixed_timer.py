"""A timer of the kernel benchmark for which a call takes as many seconds as it returns."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.bench.kernels.case import Setting
from quire.bench.kernels.limits import DeviceLimits
from quire.bench.kernels.timing import Call, Sample, Timer

LIMITS = DeviceLimits(read_bytes_s=100.0, copy_bytes_s=50.0, flops_s=1000.0, matrix=8)


class FixedTimer(Timer):
    device, name, cache_bytes, n_turns = torch.device("cpu"), "fixed", 1 << 10, 2

    def sample(self, calls: Sequence[Call], budget_s: float, capture: bool = True) -> Sample:
        return Sample(tuple(float(call()) for call in calls))  # type: ignore[arg-type]

    def synchronize(self) -> None: ...

    def release(self) -> None: ...


SETTING = Setting(FixedTimer(), torch.float32)
