"""Where the time of a step goes: on the device by kind of kernel, on the host by phase of the loop.

Owns the names by which kernels are told apart. Does not record anything (`profiling.py`). Needs no torch.
Invariant: the parts of the device and the parts of the host both add up to the whole window.
"""

from __future__ import annotations

import collections
import dataclasses
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence

from quire.bench.limit import MOST_SHARE
from quire.engine.step_record import HostTimes, StepRecord

EXPERTS, STATE = "experts", "state"
SUMS, WAITING = "sums over ranks", "waiting for ranks"
"""What of a sum is longer than its kernel's median is taken for waiting; what all of them wait is not seen."""
KINDS = (
    (SUMS, re.compile(r"QuirePeers|nccl|quire_ranks_")),
    (
        EXPERTS,
        re.compile(r"quire_moe|QuireMoe|moe_(few|wide)|quire_experts|^(route|count|place|up|down|add)$"),
    ),
    (STATE, re.compile(r"quire_state|^((convolve|solve|scan)_pieces|(convolve|scan|norm)_rows|keep_inputs)$")),
    (
        "attention",
        re.compile(r"QuireAttn|attention|attn|fmha|flash|small_lines_kernel|merge_kernel|^(small|large|merge)$", re.I),
    ),
    (
        "linear",
        re.compile(r"QuireGemm|gemm|gemv|nvjet|cutlass|xmma|splitk|cublas|linear|addmm|matmul|\b(mm|bmm)\b", re.I),
    ),
)
"""Kind → names of its kernels, the first match counts: ours in CUDA (by the type of their arguments) and Triton, those
of cuBLAS and other libraries, and torch's operators and ours on a CPU. Whatever matches nothing is `OTHER`."""
OPTIONAL = (EXPERTS, STATE, SUMS)
"""Parts only of models that have them, or of several ranks."""
OTHER, GAPS, OTHER_HOST = "other kernels", "gaps", "other"
OTHER_KINDS = (
    ("norms", re.compile(r"QuireNorm|^_(norm|layer_norm|add_norm)$|rms_?norm|layer_?norm", re.I)),
    (
        "sampling",
        re.compile(
            r"QuireCollect|^_(group_stats|select|finish|place_in|collect|widen|penalise|logits|largest)$|arg_?max", re.I
        ),
    ),
)
"""What is told apart within `OTHER`."""
WHOLE, WHOLE_NAME = "native step", "quire_fused_step"
"""A CPU's step in one native call, which no profiler looks into; a part only where there is one."""
PHASES = (
    ("schedule", "schedule_s", "submit_s"),
    ("submit", "submit_s", "submitted_s"),
    ("wait", "wait_s", "commit_s"),
    ("commit", "commit_s", "committed_s"),
)
"""Name, field of `HostTimes` at which it begins, field at which it ends."""
N_TOP = 20
NOTHING_SEEN = "unknown: the profiler saw no kernel; KINETO_LOG_LEVEL=0 makes it say why"


@dataclasses.dataclass(frozen=True, slots=True)
class Kernel:
    """Something that the device did, in seconds of the engine's clock."""

    name: str
    start_s: float
    end_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class Capture:
    """Some steps in a row, recorded by a profiler."""

    begin_s: float
    end_s: float
    records: Sequence[StepRecord]
    """Of the whole pass."""
    kernels: Sequence[Kernel]
    """By time of start."""

    @property
    def steps(self) -> list[StepRecord]:
        """Those whose result the host was given inside the window."""
        return [record for record in self.records if self.begin_s < record.times.commit_s <= self.end_s]


@dataclasses.dataclass(frozen=True, slots=True)
class Breakdown:
    """Means of one step, in ms. Each of the two tables adds up to `step_ms`."""

    n_steps: int
    n_tokens: float
    step_ms: float
    device_ms: dict[str, float]
    host_ms: dict[str, float]
    kernels: list[dict[str, object]]
    """The longest: name, kind, calls and ms a step."""
    others_ms: dict[str, float]
    """Of `OTHER`, as far as it is told apart; a part of `device_ms`."""
    limits_ms: dict[str, float]
    """What the device's parts take at best, where that is known."""

    def lines(self) -> list[str]:
        """For people."""
        device, others, host = (
            ", ".join(self._part(name, ms) for name, ms in parts.items())
            for parts in (self.device_ms, self.others_ms, self.host_ms)
        )
        return [
            f"a step of {self.n_tokens:,.1f} tokens takes {self.step_ms:.3g} ms (mean of {self.n_steps}, profiled)",
            f"  device  {device if self.kernels else NOTHING_SEEN}",
            *([f"          of {OTHER}: {others}"] if others else []),
            f"  host    {host}",
        ]

    def _part(self, name: str, ms: float) -> str:
        limit_ms = self.limits_ms.get(name, 0.0)
        limit = f", limit {limit_ms:.2f}" if 0.0 < limit_ms <= MOST_SHARE * ms else ""
        return f"{name} {ms:.2f} ms ({100 * ms / self.step_ms:.0f} %{limit})"


def kind_of(name: str) -> str:
    """One of `KINDS`, `WHOLE` or `OTHER`."""
    if name == WHOLE_NAME:
        return WHOLE
    return next((kind for kind, pattern in KINDS if pattern.search(name)), OTHER)


def breakdown(capture: Capture, limits_ms: Mapping[str, float] | None = None) -> Breakdown:
    """Divide the window among its steps. limits_ms: by part, of a step of the window."""
    n_steps, window_s = len(capture.steps), capture.end_s - capture.begin_s
    per_step_ms = 1e3 / n_steps
    times_s: dict[str, list[float]] = collections.defaultdict(list)
    for kernel, seconds in own_times(capture):
        times_s[kernel.name].append(seconds)
    names_s = collections.Counter({name: sum(times) for name, times in times_s.items()})
    device_s = _device_parts_s(times_s)
    device_s[GAPS] = window_s - sum(device_s.values())
    others_s: dict[str, float] = {}
    for name, seconds in names_s.items():
        part = next((part for part, pattern in OTHER_KINDS if pattern.search(name)), None)
        if part is not None and kind_of(name) == OTHER:
            others_s[part] = others_s.get(part, 0.0) + seconds
    host_s = {name: 0.0 for name, _, _ in PHASES}
    for record in capture.records:
        for name, start_s, end_s in phases(record.times):
            host_s[name] += max(0.0, min(end_s, capture.end_s) - max(start_s, capture.begin_s))
    host_s[OTHER_HOST] = window_s - sum(host_s.values())
    top = [
        {"name": name, "kind": kind_of(name), "calls": len(times_s[name]) / n_steps, "ms": seconds * per_step_ms}
        for name, seconds in names_s.most_common(N_TOP)
    ]

    def means_ms(parts_s: Mapping[str, float]) -> dict[str, float]:
        return {name: seconds * per_step_ms for name, seconds in parts_s.items()}

    return Breakdown(
        n_steps=n_steps,
        n_tokens=sum(record.n_tokens for record in capture.steps) / n_steps,
        step_ms=window_s * per_step_ms,
        device_ms=means_ms(device_s),
        host_ms=means_ms(host_s),
        kernels=top,
        others_ms=means_ms(others_s),
        limits_ms=dict(limits_ms or {}),
    )


def _device_parts_s(times_s: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Seconds of each kind. times_s: of each call of a kernel, by name."""
    kinds = sorted((kind for kind, _ in KINDS), key=lambda kind: kind in OPTIONAL)
    found: dict[str, float] = dict.fromkeys([*kinds, OTHER], 0.0)
    waited_s = 0.0
    for name, times in times_s.items():
        kind, seconds = kind_of(name), sum(times)
        if kind == SUMS:
            usual_s = statistics.median(times)
            waited_s += sum(max(0.0, each - usual_s) for each in times)
            seconds = sum(min(each, usual_s) for each in times)
        found[kind] = found.get(kind, 0.0) + seconds
    found = {kind: seconds for kind, seconds in found.items() if seconds or kind not in OPTIONAL}
    return found | ({WAITING: waited_s} if SUMS in found else {})


def phases(times: HostTimes) -> Iterator[tuple[str, float, float]]:
    """(name, begin, end) of a step's phases on the host."""
    for name, begin, end in PHASES:
        yield name, getattr(times, begin), getattr(times, end)


def own_times(capture: Capture) -> Iterator[tuple[Kernel, float]]:
    """Seconds of each kernel inside the window; what runs at the same time counts for the one that began first."""
    covered_s = capture.begin_s
    for kernel in capture.kernels:
        end_s = min(kernel.end_s, capture.end_s)
        if end_s > capture.begin_s and kernel.start_s < capture.end_s:
            yield kernel, max(0.0, end_s - max(kernel.start_s, covered_s))
            covered_s = max(covered_s, end_s)


def outermost(kernels: Iterable[Kernel]) -> list[Kernel]:
    """By time of start, without those that lie inside another: operators call operators."""
    kept: list[Kernel] = []
    for kernel in sorted(kernels, key=lambda kernel: (kernel.start_s, -kernel.end_s)):
        if not kept or kernel.end_s > kept[-1].end_s:
            kept.append(kernel)
    return kept
