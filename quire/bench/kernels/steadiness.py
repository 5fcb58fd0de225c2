"""Whether times on this CPU mean anything: on a busy core each parallel call waits for the thread that has to wait.

Such times are multiples of the scheduler's slice, and may be so steady that their spread is nothing. What one thread
takes for the same work gives them away, or a case's best time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from quire.bench.kernels.measurement import Timing
from quire.bench.kernels.timing import CpuTimer

N_ELEMENTS = 1 << 20
BUDGET_S = 0.15
SLOWER = 2.0
"""The mean with all threads is so many times what one thread takes at best: it should be a part of it."""
UNSTEADY = 3.0
"""A case's median is so many times its best."""


def of_probe() -> str:
    """A warning, or "". Takes 2 x BUDGET_S; torch's number of threads is as before."""
    n_threads, timer, source = torch.get_num_threads(), CpuTimer(), torch.randn(N_ELEMENTS)
    out = torch.empty_like(source)

    def probe() -> tuple[float, ...]:
        return timer.sample([lambda: torch.exp(source, out=out)], BUDGET_S).times_s

    together_s = probe()
    torch.set_num_threads(1)
    try:
        alone_s = probe()
    finally:
        torch.set_num_threads(n_threads)
    return verdict(together_s, alone_s, n_threads)


def verdict(together_s: Sequence[float], alone_s: Sequence[float], n_threads: int) -> str:
    """The warning for seconds of one piece of work with all threads and with one, or ""."""
    mean_s, best_s = sum(together_s) / len(together_s), min(alone_s)
    if mean_s <= SLOWER * best_s:
        return ""
    taken = f"{n_threads} threads take" if n_threads > 1 else "one thread takes"
    return _warning(f"{taken} {mean_s * 1e3:.1f} ms for what one does in {best_s * 1e3:.1f} ms", n_threads)


def of_times(rows: Iterable[Timing], n_threads: int) -> str:
    """The warning for cases measured on this CPU, or ""."""
    jumping = [row for row in rows if row.time_s > UNSTEADY * row.best_s]
    if not jumping:
        return ""
    worst = max(jumping, key=lambda row: row.time_s / row.best_s)
    name = f"{worst.op} {worst.case}, {worst.implementation}"
    return _warning(f"the median of {name} is {worst.time_s / worst.best_s:.0f} times its best time", n_threads)


def _warning(evidence: str, n_threads: int) -> str:
    remedy = "a quiet machine" + (", or with OMP_NUM_THREADS=1 (no thread waits for another)" if n_threads > 1 else "")
    return f"WARNING: times are unstable, the cores are busy: {evidence}. Measure again on {remedy}"
