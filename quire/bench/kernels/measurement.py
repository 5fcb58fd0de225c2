"""Runs cases and checks, one after another, and keeps what came out: figures, reasons, errors.

Invariant: whatever one contender raises becomes its own row and the run goes on.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import gc
import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from quire.bench.kernels.case import Case, Check, Contender, NotRun, Setting
from quire.bench.kernels.limits import DeviceLimits
from quire.bench.kernels.timing import Call, CpuTimer, Sample
from quire.bench.machine import n_cores

T = TypeVar("T")

BUDGET_S = {"cuda": 0.12, "cpu": 0.25}
QUICK_BUDGET_S = {"cuda": 0.06, "cpu": 0.1}
MAX_ERROR_LENGTH = 300
RIGHT, WRONG, NOT_CHECKED = "right", "wrong", "not checked"


@dataclasses.dataclass(slots=True)
class Timing:
    """One contender in one case."""

    op: str
    case: str
    implementation: str
    is_peer: bool
    time_s: float = math.nan
    """Median."""
    best_s: float = math.nan
    spread: float = math.nan
    """10th to 90th percentile, as a share of the median."""
    bytes_s: float = math.nan
    flops_s: float = math.nan
    in_flops: bool = False
    """Which of the two rates is usual for the case."""
    bound: str = ""
    """What binds: read, copy, matmul, or host."""
    share: float = math.nan
    """Of the limit: least time / time."""
    ratio: float = math.nan
    """Time in units of `ratio_to`."""
    ratio_to: str = ""
    note: str = ""
    """Why it was not run."""
    error: str = ""
    checked: str = ""
    """Whether checks found what is timed `RIGHT` or `WRONG`, or did not look at it: `NOT_CHECKED`. '': a peer, or
    something that gives no result."""


@dataclasses.dataclass(slots=True)
class Accuracy:
    """One check of one implementation."""

    op: str
    check: str
    implementation: str
    error: float = math.nan
    tolerance: float = math.nan
    note: str = ""
    failure: str = ""

    @property
    def good(self) -> bool:
        """It was compared, and is right."""
        return not self.failure and not self.note and self.error <= self.tolerance

    @property
    def bad(self) -> bool:
        """It raised, or is wrong. Neither good nor bad is what did not take the inputs: it was not checked."""
        return not self.good and not self.note


@dataclasses.dataclass(slots=True)
class Results:
    """All of a run."""

    limits: DeviceLimits
    accuracies: list[Accuracy] = dataclasses.field(default_factory=list)
    timings: list[Timing] = dataclasses.field(default_factory=list)
    left_out: list[str] = dataclasses.field(default_factory=list)
    """Cases for which no time was left."""
    notes: list[str] = dataclasses.field(default_factory=list)
    """What else there is to know, for instance peers that are not installed."""

    @property
    def failed(self) -> bool:
        """An implementation of ours raised, or its result is wrong. Peers may fail."""
        return any(one.bad for one in self.accuracies) or any(row.error and not row.is_peer for row in self.timings)


class Progress:
    """Lines on stderr with the seconds since the start."""

    def __init__(self) -> None:
        self.start_s = time.perf_counter()

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self.start_s

    def say(self, text: str) -> None:
        print(f"[{self.elapsed_s:6.1f} s] {text}", file=sys.stderr, flush=True)


def prepare(cases: Sequence[Case], progress: Progress) -> None:
    """Build at the same time what the cases need. Failures show again, with their reason, where a case runs."""
    first = {case.prepare_key: case.prepare for case in cases if case.prepare is not None}
    if not first:
        return
    progress.say(f"building kernels for {len(first)} kinds of cases")
    with concurrent.futures.ThreadPoolExecutor(n_cores()) as pool:
        for failure in filter(None, (future.exception() for future in map(pool.submit, first.values()))):
            progress.say(f"a build failed: {_one_line(failure)}")


def check_all(checks: Iterable[Check], progress: Progress) -> list[Accuracy]:
    """Run the checks in order."""
    found = []
    for check in checks:
        row = Accuracy(check.op, check.name, check.implementation, tolerance=check.tolerance)
        value, row.note, row.failure = _attempt(check.error)
        row.error = math.nan if value is None else value
        if row.bad:
            progress.say(f"WRONG {row.op} {row.implementation}, {row.check}: {row.failure or f'error {row.error:.2e}'}")
        found.append(row)
    return found


def time_all(cases: Sequence[Case], setting: Setting, results: Results, limit_s: float, progress: Progress) -> None:
    """Time the cases, until `limit_s` after the first began (0: all). Builds and checks come before.

    Each op has an equal share of the time that is left when its turn comes, and at least one case; what is left behind
    the last one goes to cases that had none.
    """
    ops = {case.op: [one for one in cases if one.op == case.op] for case in cases}
    end_s, n_begun, late = progress.elapsed_s + limit_s, 0, list[Case]()

    def begin(case: Case) -> None:
        nonlocal n_begun
        n_begun += 1
        progress.say(f"{n_begun}/{len(cases)} {case.op}: {case.name}")
        results.timings += _time_case(case, setting)
        gc.collect()
        setting.timer.release()

    for turn, own in enumerate(ops.values()):
        start_s = progress.elapsed_s
        op_end_s = start_s + max(0.0, end_s - start_s) / (len(ops) - turn)
        for i, case in enumerate(own):
            if limit_s and i and progress.elapsed_s > op_end_s:
                late.append(case)
            else:
                begin(case)
    for case in late:
        if progress.elapsed_s > end_s:
            results.left_out.append(f"{case.op}: {case.name}")
        else:
            begin(case)
    places = {(case.op, case.name): place for place, case in enumerate(cases)}
    results.timings.sort(key=lambda row: places[row.op, row.case])


def _time_case(case: Case, setting: Setting) -> list[Timing]:
    contenders, note, error = _attempt(lambda: list(case.contenders()))
    if contenders is None:
        return [Timing(case.op, case.name, "all", False, note=note, error=error)]
    entrants = [_Entrant(case, contender) for contender in contenders]
    if not entrants:
        return [Timing(case.op, case.name, "none", False, note=f"nothing computes {case.op} on this machine")]
    n_turns = setting.timer.n_turns
    budget_s = (QUICK_BUDGET_S if setting.quick else BUDGET_S)[setting.device.type] / n_turns
    for _ in range(n_turns):
        for entrant in entrants:
            entrant.take_turn(setting, budget_s)
    return [entrant.row for entrant in entrants]


class _Entrant:
    """A contender, its calls, and what has come out so far."""

    def __init__(self, case: Case, contender: Contender) -> None:
        self.row = Timing(case.op, case.name, contender.name, contender.is_peer, in_flops=case.in_flops)
        self._contender = contender
        self._calls: Sequence[Call] = ()
        self._times_s: tuple[float, ...] = ()

    def take_turn(self, setting: Setting, budget_s: float) -> None:
        """Measure, unless an earlier turn went wrong."""
        if self.row.error or self.row.note:
            return
        sample, self.row.note, self.row.error = _attempt(lambda: self._sample(setting, budget_s))
        if sample is not None:
            self._times_s += sample.times_s
            joined = Sample(self._times_s)
            self.row.time_s, self.row.best_s, self.row.spread = joined.median_s, min(self._times_s), joined.spread

    def _sample(self, setting: Setting, budget_s: float) -> Sample:
        self._calls = self._calls or self._contender.make()
        timer = CpuTimer() if self._contender.on_host else setting.timer
        sample = timer.sample(self._calls, budget_s, self._contender.capture)
        setting.timer.synchronize()
        return sample


def judge(cases: Sequence[Case], results: Results) -> None:
    """Put the times against the limits and against each other."""
    works = {(case.op, case.name): case.work for case in cases}
    for row in results.timings:
        work = works[row.op, row.case]
        row.bound = "host"
        if work is not None:
            least_s, row.bound = results.limits.least_s(work)
            row.share = least_s / row.time_s
            row.bytes_s, row.flops_s = work.total_bytes / row.time_s, work.flops / row.time_s
    _compare(cases, results.timings)
    _confirm(cases, results)


def beyond_memory(rows: Sequence[Timing]) -> str:
    """A line about times of a CPU that are shorter than its memory allows; '' without any."""
    n = sum(row.bound in ("read", "copy") and round(100 * row.share) > 100 for row in rows if row.share > 0)
    said = f"{n} times are of more than 100 % of the limit" if n > 1 else "1 time is of more than 100 % of the limit"
    return f"{said}: that is the rate of memory, and what a small case reads stays in the CPU's caches" if n else ""


def _confirm(cases: Sequence[Case], results: Results) -> None:
    """Say of each time of ours whether checks of the case's kind have compared that implementation."""
    kinds = {(case.op, case.name): case.kind for case in cases}
    for row in results.timings:
        kind = kinds[row.op, row.case]
        if row.is_peer or row.note or row.error or not kind:
            continue
        of_it = [one for one in results.accuracies if (one.op, one.check) == (row.op, kind)]
        made = [one for one in of_it if one.implementation == row.implementation and not one.note]
        row.checked = (RIGHT if all(one.good for one in made) else WRONG) if made else NOT_CHECKED


def _compare(cases: Sequence[Case], rows: Sequence[Timing]) -> None:
    """Ratios: of a case with a baseline to the same implementation there, of others to our fastest in the case."""
    times = {(row.op, row.case, row.implementation): row.time_s for row in rows}
    baselines = {(case.op, case.name): case.baseline for case in cases}
    for row in rows:
        baseline = baselines[row.op, row.case]
        together = [other for other in rows if (other.op, other.case) == (row.op, row.case)]
        ours = [other.time_s for other in together if not other.is_peer and other.time_s > 0]
        if baseline:
            row.ratio, row.ratio_to = row.time_s / times.get((row.op, baseline, row.implementation), math.nan), baseline
        elif ours and row.time_s != min(ours):
            row.ratio, row.ratio_to = row.time_s / min(ours), "our fastest"


def _attempt(function: Callable[[], T]) -> tuple[T | None, str, str]:
    """(value, why it was not run, what it raised)."""
    try:
        return function(), "", ""
    except NotRun as reason:
        return None, _one_line(reason), ""
    except Exception as error:  # Any failure of a kernel or a peer: it becomes a row of the report.
        return None, "", f"{type(error).__name__}: {_one_line(error)}"


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:MAX_ERROR_LENGTH]
