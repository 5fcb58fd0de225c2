"""What the engine's device can do at most, probed in the run that is judged by it, as the planner's `Ceilings`.

Owns when and for how long; the probes are those of the kernel benchmark. Invariant: a ceiling that is measured again
only rises, so that a busy moment does not lower the limit.
"""

from __future__ import annotations

import msgspec
import torch

from quire.bench.kernels.limits import matmul_rate, random_numbers, read_rate
from quire.bench.kernels.timing import Timer
from quire.planner.calibration import Ceilings

READ_BYTES = {"cuda": 4 << 30, "cpu": 192 << 20}
BUDGET_S = {"cuda": 0.2, "cpu": 0.2}


def probe(timer: Timer, dtypes: list[torch.dtype]) -> Ceilings:
    """Read bandwidth and the rate of products of `dtypes`. On a GPU it takes 4 GiB for a moment: call it first."""
    kind = timer.device.type
    source = random_numbers(timer, READ_BYTES[kind])
    bandwidth = read_rate(timer, source, BUDGET_S[kind])
    del source
    timer.release()
    rates = {str(dtype).removeprefix("torch."): matmul_rate(timer, dtype, BUDGET_S[kind]) for dtype in dtypes}
    timer.release()
    return Ceilings(device=timer.name, read_bytes_per_s=bandwidth, flops_per_s=rates)


def higher(first: Ceilings, second: Ceilings) -> Ceilings:
    """The better of each ceiling."""
    return msgspec.structs.replace(
        first, read_bytes_per_s=max(first.read_bytes_per_s, second.read_bytes_per_s),
        flops_per_s={kind: max(rate, second.flops_per_s[kind]) for kind, rate in first.flops_per_s.items()},
    )  # fmt: skip
