"""How long a call takes on a device: CUDA graphs and events on a GPU, the wall clock on a CPU.

Owns warm-up, repetitions and median. Does not own the inputs: callers give one call for each copy of them, enough
copies to leave the cache (`Timer.n_copies`), and they are walked through in turn.
"""

from __future__ import annotations

import abc
import dataclasses
import itertools
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from quire.bench.summary import percentile

Call = Callable[[], object]

CACHE_FACTOR = 2
"""Inputs of one pass exceed the last cache so many times."""
MAX_COPIES = 1024
GRAPH_S = 2e-3
"""A graph holds enough passes to take about this long, so that its launch does not count."""
MAX_GRAPH_CALLS = 256
STRETCH_S = 1e-3
"""The wall clock is read at most so often."""
DEFAULT_CACHE_BYTES = 64 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """Seconds of one call, several times."""

    times_s: tuple[float, ...]

    @property
    def median_s(self) -> float:
        return percentile(self.times_s, 50)

    @property
    def spread(self) -> float:
        """Distance from the 10th to the 90th percentile, as a share of the median."""
        return (percentile(self.times_s, 90) - percentile(self.times_s, 10)) / self.median_s


class Timer(abc.ABC):
    """A device that calls run on."""

    device: torch.device
    name: str
    cache_bytes: int
    n_turns: int
    """Contenders of a case are timed in so many turns: the speed of a shared CPU drifts."""

    def n_copies(self, n_bytes: float) -> int:
        """How many inputs of `n_bytes` a pass needs so that none of them is found in the cache."""
        return min(MAX_COPIES, 1 + int(CACHE_FACTOR * self.cache_bytes / max(1.0, n_bytes)))

    @abc.abstractmethod
    def sample(self, calls: Sequence[Call], budget_s: float, capture: bool = True) -> Sample:
        """Time `calls` in turn for about `budget_s` after a warm-up. capture: they may go into a CUDA graph."""

    @abc.abstractmethod
    def synchronize(self) -> None:
        """Wait for the device."""

    @abc.abstractmethod
    def release(self) -> None:
        """Give memory that no tensor holds back to the device."""


class CpuTimer(Timer):
    """This processor, with torch's threads."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.name, self.n_turns = f"{torch.get_num_threads()} thread{'s' * (torch.get_num_threads() != 1)}", 3
        self.cache_bytes = _last_cache_bytes()

    def sample(self, calls: Sequence[Call], budget_s: float, capture: bool = True) -> Sample:
        """See `Timer`."""
        calls[0]()
        in_turn = itertools.cycle(calls)
        n = max(1, int(STRETCH_S / _seconds(in_turn, 1)))
        times: list[float] = []
        end_s = time.perf_counter() + budget_s
        while not times or time.perf_counter() < end_s:
            times.append(_seconds(in_turn, n) / n)
        return Sample(tuple(times))

    def synchronize(self) -> None:
        """Nothing runs behind the caller's back."""

    def release(self) -> None:
        """Freed memory is the system's."""


class CudaTimer(Timer):
    """The current CUDA device and stream."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        properties = torch.cuda.get_device_properties(self.device)
        self.name, self.n_turns = properties.name, 1
        self.cache_bytes = getattr(properties, "L2_cache_size", DEFAULT_CACHE_BYTES)

    def sample(self, calls: Sequence[Call], budget_s: float, capture: bool = True) -> Sample:
        """See `Timer`. Without capture the host's launches count where they are slower than the kernels."""
        calls[0]()
        self._passes(calls, 1)
        pass_s = self._passes(calls, 1)[0]
        n_inside = max(1, min(int(GRAPH_S / pass_s), MAX_GRAPH_CALLS // len(calls)))
        n_passes = max(5, min(50, int(budget_s / (pass_s * n_inside))))
        inside = list(calls) * n_inside
        if capture:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for call in inside:
                    call()
            times = self._passes([graph.replay], n_passes)
        else:
            times = self._passes(inside, n_passes)
        return Sample(tuple(seconds / len(inside) for seconds in times))

    def _passes(self, calls: Sequence[Call], n_passes: int) -> list[float]:
        """Seconds of each pass. The first event comes after a pass, so that the stream is busy when timing begins."""
        events = [torch.cuda.Event(enable_timing=True) for _ in range(n_passes + 1)]  # type: ignore[no-untyped-call]
        for event in events:
            for call in calls:
                call()
            event.record()
        torch.cuda.synchronize()
        return [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(events)]

    def synchronize(self) -> None:
        """See `Timer`."""
        torch.cuda.synchronize()

    def release(self) -> None:
        """See `Timer`."""
        torch.cuda.empty_cache()


def _seconds(calls: Iterator[Call], n: int) -> float:
    """Wall time of the next n calls."""
    start_s = time.perf_counter()
    for call in itertools.islice(calls, n):
        call()
    return time.perf_counter() - start_s


def timer(device_type: str) -> Timer:
    """The timer of 'cpu' or 'cuda'."""
    return CudaTimer() if device_type == "cuda" else CpuTimer()


def _last_cache_bytes() -> int:
    """Size of the largest cache of the first processor, as Linux reports it."""
    sizes = [path.read_text().strip() for path in pathlib.Path("/sys/devices/system/cpu/cpu0/cache").glob("*/size")]
    return max((int(size[:-1]) << 10 for size in sizes if size.endswith("K")), default=DEFAULT_CACHE_BYTES)
