"""What the engine's device can do at most, probed in the run that is judged by it, as the planner's `Hardware`.

Owns when and for how long; the probes are those of the kernel benchmark. Invariant: a ceiling that is measured again
only rises, so that a busy moment does not lower the limit.
"""

from __future__ import annotations

import dataclasses

import torch

from quire.bench.kernels.limits import matmul_rate, random_numbers, read_rate
from quire.bench.kernels.timing import Timer
from quire.planner.hardware import Hardware

READ_BYTES = {"cuda": 4 << 30, "cpu": 192 << 20}
BUDGET_S = {"cuda": 0.2, "cpu": 0.2}


def probe(timer: Timer, dtypes: list[torch.dtype]) -> Hardware:
    """Read bandwidth and the best product rate of `dtypes`. On a GPU it takes 4 GiB for a moment: call it first."""
    kind = timer.device.type
    source = random_numbers(timer, READ_BYTES[kind])
    bandwidth = read_rate(timer, source, BUDGET_S[kind])
    del source
    timer.release()
    rates = [matmul_rate(timer, dtype, BUDGET_S[kind]) for dtype in dtypes]
    timer.release()
    return Hardware(timer.name, bandwidth, max(rates), 0.0)


def higher(first: Hardware, second: Hardware) -> Hardware:
    """The better of each ceiling."""
    return dataclasses.replace(
        first,
        bandwidth_bytes_per_s=max(first.bandwidth_bytes_per_s, second.bandwidth_bytes_per_s),
        flops_per_s=max(first.flops_per_s, second.flops_per_s),
    )
