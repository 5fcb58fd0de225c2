"""What the device can do at most, measured in the same run: reading, copying, multiplying matrices.

Owns the roofline: the least time for given work. Invariant: the limit of work is the larger of its time for memory and
its time for arithmetic, nothing else is counted.
"""

from __future__ import annotations

import dataclasses
import functools

import torch

from quire.bench.kernels.timing import Call, Timer

READ_BYTES = {"cuda": 4 << 30, "cpu": 192 << 20}
MATRIX = {"cuda": 8192, "cpu": 1536}
BUDGET_S = {"cuda": 0.3, "cpu": 0.6}
WRITES_COUNT = 0.1
"""From this share of written bytes on, the copy's bandwidth is the limit, below it the reading one's."""


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """What one call has to move and to compute at least."""

    read_bytes: float
    written_bytes: float = 0.0
    flops: float = 0.0

    @property
    def total_bytes(self) -> float:
        return self.read_bytes + self.written_bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """The device's best, each in units a second."""

    read_bytes_s: float
    copy_bytes_s: float
    """Read plus written."""
    flops_s: float
    """A square matmul in the run's dtype."""
    matrix: int

    def better(self, other: Limits) -> Limits:
        """The higher of each: a limit that was measured twice."""
        return Limits(
            max(self.read_bytes_s, other.read_bytes_s),
            max(self.copy_bytes_s, other.copy_bytes_s),
            max(self.flops_s, other.flops_s),
            self.matrix,
        )

    def least_s(self, work: Work) -> tuple[float, str]:
        """Seconds that the work takes at least, and what binds: 'read', 'copy' or 'matmul'."""
        writes = work.written_bytes > WRITES_COUNT * work.total_bytes
        memory = (work.total_bytes / (self.copy_bytes_s if writes else self.read_bytes_s), "copy" if writes else "read")
        return max(memory, (work.flops / self.flops_s, "matmul"))


def measure_limits(timer: Timer, dtype: torch.dtype) -> Limits:
    """Measure them. Random data: zeros would be faster than anything real."""
    read_bytes_s, copy_bytes_s = _memory(timer)
    timer.release()
    size = MATRIX[timer.device.type]
    a, b = (torch.randn(size, size, device=timer.device).to(dtype) for _ in range(2))
    matmul_s = _best_s(timer, functools.partial(torch.mm, a, b, out=torch.empty_like(a)), 1.0)
    return Limits(read_bytes_s, copy_bytes_s, 2 * size**3 / matmul_s, size)


def _memory(timer: Timer) -> tuple[float, float]:
    """Bytes a second of the best of a few reductions, and of a copy."""
    source = torch.randn(READ_BYTES[timer.device.type] // 4, device=timer.device)
    n_bytes = 4 * source.numel()
    rows = source.view(1024, -1)
    reads = (source.sum, functools.partial(rows.sum, -1), functools.partial(rows.amax, -1))
    read_s = min(_best_s(timer, call, 1 / len(reads)) for call in reads)
    copy_s = _best_s(timer, functools.partial(torch.empty_like(source).copy_, source), 1.0)
    return n_bytes / read_s, 2 * n_bytes / copy_s


def _best_s(timer: Timer, call: Call, share: float) -> float:
    """Least seconds on a CPU, whose speed drifts, the median on a GPU; share: of the time for one limit."""
    sample = timer.sample([call], share * BUDGET_S[timer.device.type], capture=False)
    return min(sample.times_s) if timer.device.type == "cpu" else sample.median_s
