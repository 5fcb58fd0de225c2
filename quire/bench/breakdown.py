"""Where the time of a step goes: on the device by kind of kernel, on the host by phase of the loop.

Owns the names by which kernels are told apart. Does not record anything (`profiling.py`). Needs no torch.
Invariant: the parts of the device and the parts of the host both add up to the whole window.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Iterable, Iterator, Sequence

from quire.engine.step_record import HostTimes, StepRecord

EXPERTS, STATE = "experts", "state"
KINDS = (
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
OPTIONAL = (EXPERTS, STATE)
"""Parts only of models that have them."""
OTHER, GAPS, OTHER_HOST = "other kernels", "gaps", "other"
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

    def lines(self) -> list[str]:
        """For people."""
        device, host = (
            ", ".join(self._part(name, ms) for name, ms in parts.items()) for parts in (self.device_ms, self.host_ms)
        )
        return [
            f"a step of {self.n_tokens:,.1f} tokens takes {self.step_ms:.3g} ms (mean of {self.n_steps}, profiled)",
            f"  device  {device if self.kernels else NOTHING_SEEN}",
            f"  host    {host}",
        ]

    def _part(self, name: str, ms: float) -> str:
        return f"{name} {ms:.2f} ms ({100 * ms / self.step_ms:.0f} %)"


def kind_of(name: str) -> str:
    """One of `KINDS`, `WHOLE` or `OTHER`."""
    if name == WHOLE_NAME:
        return WHOLE
    return next((kind for kind, pattern in KINDS if pattern.search(name)), OTHER)


def breakdown(capture: Capture) -> Breakdown:
    """Divide the window among its steps."""
    n_steps, window_s = len(capture.steps), capture.end_s - capture.begin_s
    per_step_ms = 1e3 / n_steps
    kinds = sorted((kind for kind, _ in KINDS), key=lambda kind: kind in OPTIONAL)
    device_s: dict[str, float] = dict.fromkeys([*kinds, OTHER], 0.0)
    names_s: collections.Counter[str] = collections.Counter()
    calls: collections.Counter[str] = collections.Counter()
    for kernel, seconds in own_times(capture):
        kind = kind_of(kernel.name)
        device_s[kind] = device_s.get(kind, 0.0) + seconds
        names_s[kernel.name] += seconds  # type: ignore[assignment]  # Counter adds floats as well
        calls[kernel.name] += 1
    device_s = {kind: seconds for kind, seconds in device_s.items() if seconds or kind not in OPTIONAL}
    device_s[GAPS] = window_s - sum(device_s.values())
    host_s = {name: 0.0 for name, _, _ in PHASES}
    for record in capture.records:
        for name, start_s, end_s in phases(record.times):
            host_s[name] += max(0.0, min(end_s, capture.end_s) - max(start_s, capture.begin_s))
    host_s[OTHER_HOST] = window_s - sum(host_s.values())
    top = [
        {"name": name, "kind": kind_of(name), "calls": calls[name] / n_steps, "ms": seconds * per_step_ms}
        for name, seconds in names_s.most_common(N_TOP)
    ]
    return Breakdown(
        n_steps=n_steps,
        n_tokens=sum(record.n_tokens for record in capture.steps) / n_steps,
        step_ms=window_s * per_step_ms,
        device_ms={name: seconds * per_step_ms for name, seconds in device_s.items()},
        host_ms={name: seconds * per_step_ms for name, seconds in host_s.items()},
        kernels=top,
    )


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
