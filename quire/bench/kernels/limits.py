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
BLOCK = 1 << 20
"""Random numbers that a large source repeats: making them all would take longer than reading them."""
MATRIX = {"cuda": 8192, "cpu": 1536}
TRIAL_MATRIX, TRIAL_S = 128, 0.03
"""Tell how large matrices may be for the time there is. By one thread: where others use the cores too, small products
of several wait for one another most of the time, and some thousandth of the rate is seen."""
BUDGET_S = {"cuda": 0.3, "cpu": 0.6}
WRITES_COUNT = 0.1
"""From this share of written bytes on, the copy's bandwidth is the limit, below it the reading one's."""


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """What one call has to move and to compute at least."""

    read_bytes: float
    written_bytes: float = 0.0
    flops: float = 0.0
    matmul_speed: float = 1.0
    """Of the device's product of what is multiplied, to that in the run's dtype: 2 in 8 bits."""

    @property
    def total_bytes(self) -> float:
        return self.read_bytes + self.written_bytes


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceLimits:
    """The device's best, each in units a second."""

    read_bytes_s: float
    copy_bytes_s: float
    """Read plus written."""
    flops_s: float
    """A square matmul in the run's dtype."""
    matrix: int

    def better(self, other: DeviceLimits) -> DeviceLimits:
        """The higher of each: a limit that was measured twice."""
        return DeviceLimits(
            max(self.read_bytes_s, other.read_bytes_s),
            max(self.copy_bytes_s, other.copy_bytes_s),
            max(self.flops_s, other.flops_s),
            self.matrix,
        )

    def least_s(self, work: Work) -> tuple[float, str]:
        """Seconds that the work takes at least, and what binds: 'read', 'copy' or 'matmul'."""
        writes = work.written_bytes > WRITES_COUNT * work.total_bytes
        memory = (work.total_bytes / (self.copy_bytes_s if writes else self.read_bytes_s), "copy" if writes else "read")
        return max(memory, (work.flops / (self.flops_s * work.matmul_speed), "matmul"))


def measure_limits(timer: Timer, dtype: torch.dtype) -> DeviceLimits:
    """Measure them."""
    kind = timer.device.type
    source = random_numbers(timer, READ_BYTES[kind])
    read_bytes_s = read_rate(timer, source, BUDGET_S[kind])
    copy_s = _best_s(timer, functools.partial(torch.empty_like(source).copy_, source), BUDGET_S[kind])
    copy_bytes_s = 2 * source.nbytes / copy_s
    del source
    timer.release()
    return DeviceLimits(read_bytes_s, copy_bytes_s, matmul_rate(timer, dtype, BUDGET_S[kind]), MATRIX[kind])


def random_numbers(timer: Timer, n_bytes: int) -> torch.Tensor:
    """float32, a multiple of 4 MiB, a block of random numbers many times: zeros would be faster than anything real."""
    return torch.randn(BLOCK, device=timer.device).repeat(n_bytes // (4 * BLOCK))


def read_rate(timer: Timer, source: torch.Tensor, budget_s: float) -> float:
    """Bytes a second of the best of a few reductions of `source`, which is larger than the caches."""
    rows = source.view(1024, -1)
    calls = (source.sum, functools.partial(rows.sum, -1), functools.partial(rows.amax, -1))
    return source.nbytes / min(_best_s(timer, call, budget_s / len(calls)) for call in calls)


def matmul_rate(timer: Timer, dtype: torch.dtype, budget_s: float) -> float:
    """FLOPs a second of a square product; for int8 with sums in int32.

    A processor without products of 16-bit numbers widens them: its rate is that of float32 if that is higher. torch
    itself multiplies them there one by one, some fifty times as slowly.
    """
    if timer.device.type == "cpu" and dtype in (torch.bfloat16, torch.float16):
        return max(_product_rate(timer, each, budget_s / 2) for each in (dtype, torch.float32))
    return _product_rate(timer, dtype, budget_s)


def _product_rate(timer: Timer, dtype: torch.dtype, budget_s: float) -> float:
    """Of the largest matrices of which one product fits the budget."""
    size = MATRIX[timer.device.type]
    if timer.device.type == "cpu":
        n_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            trial_s = _best_s(timer, _product(timer, dtype, TRIAL_MATRIX), TRIAL_S) / n_threads
        finally:
            torch.set_num_threads(n_threads)
        size = max(TRIAL_MATRIX, min(size, int(TRIAL_MATRIX * (budget_s / trial_s) ** (1 / 3))))
    return 2 * size**3 / _best_s(timer, _product(timer, dtype, size), budget_s)


def _product(timer: Timer, dtype: torch.dtype, size: int) -> Call:
    shape = (size, size)
    if dtype == torch.int8:
        a, b = (torch.randint(-127, 128, shape, dtype=dtype, device=timer.device) for _ in range(2))
        return functools.partial(torch._int_mm, a, b)
    a, b = (torch.randn(shape, device=timer.device).to(dtype) for _ in range(2))
    return functools.partial(torch.mm, a, b, out=torch.empty_like(a))


def _best_s(timer: Timer, call: Call, budget_s: float) -> float:
    """Least seconds on a CPU, whose speed drifts, the median on a GPU."""
    sample = timer.sample([call], budget_s, capture=False)
    return min(sample.times_s) if timer.device.type == "cpu" else sample.median_s
