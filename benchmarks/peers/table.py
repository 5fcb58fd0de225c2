"""What is measured, against which targets, and the table of it."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Final

from benchmarks.peers.models import has_experts
from quire.bench.datasets import read_lengths

LLAMA, IK, HF = "llama.cpp", "ik_llama.cpp", "transformers"
FORMATS: Final = {"bf16": ("none", ("BF16",)), "8-bit": ("int8", ("Q8_0",)), "4-bit": ("int4", ("Q4_0", "Q4_K_M"))}
"""Format → our --quantization, the types of the peers' files."""
TRAFFIC_REQUESTS, TRAFFIC_SCALE, TRAFFIC_SLOTS = 64, 0.25, 16


@dataclasses.dataclass(frozen=True, slots=True)
class Measure:
    """One kind of run. figure: 'decode', 'prefill' or 'total' tokens a second."""

    name: str
    figure: str
    lengths: tuple[tuple[int, int], ...]
    slots: int
    targets: dict[tuple[str, str], float]
    """(format, peer) → least ratio."""
    peers: tuple[str, ...] = (LLAMA, IK, HF)
    least: float | None = None
    """Least figure of ours, whatever the peer does."""
    busy: bool = False
    unified: bool = False
    """One KV cache for all sequences of llama.cpp, as its server has it, instead of one for each."""

    def rate(self, answer: dict[str, float]) -> float:
        """Tokens a second of one run, from the figures of `lines.continuous`."""
        if self.figure == "decode":
            return answer["n_decoded"] / answer["decode_s"]
        if self.figure == "prefill":
            return sum(n for n, _ in self.lengths) / answer["first_s"]
        return answer["n_out"] / answer["total_s"]


@dataclasses.dataclass(slots=True)
class Row:
    """A measure of one model, format and peer; pairs of (peer, Quire) in `unit`."""

    model: str
    format: str
    measure: str
    peer: str
    unit: str = "tok/s"
    least_ratio: float | None = None
    limit: float | None = None
    """Our figure must be at least this many tok/s, or at most this many seconds."""
    pairs: list[tuple[float, float]] = dataclasses.field(default_factory=list)
    medians: tuple[float, float] = (0.0, 0.0)
    ratio: float = 0.0
    """Median over the pairs of how many times as fast we are."""

    def close(self) -> Row:
        """Fill medians and ratio from the pairs."""
        theirs, ours = (statistics.median(column) for column in zip(*self.pairs, strict=True))
        self.medians = theirs, ours
        ratio = statistics.median(ours / theirs for theirs, ours in self.pairs)
        self.ratio = 1 / ratio if self.unit == "s" else ratio
        return self

    @property
    def target(self) -> str:
        """The target and whether it is met; empty without one."""
        if self.least_ratio is not None:
            text, met = f">= {self.least_ratio:.2f} x", self.ratio >= self.least_ratio
        elif self.limit is not None:
            below = self.unit == "s"
            text = f"{'<=' if below else '>='} {self.limit:g} {self.unit}"
            met = self.medians[1] <= self.limit if below else self.medians[1] >= self.limit
        else:
            return ""
        return f"{text:<14}{'met' if met else 'not met'}"

    def line(self) -> str:
        names = f"{self.model:<14}{self.format:<7}{self.measure:<21}{self.peer:<22}"
        return f"{names}{self.medians[0]:9.2f}{self.medians[1]:9.2f} {self.unit:<7}{self.ratio:6.2f} x   {self.target}"


HEADER: Final = (
    f"{'model':<14}{'format':<7}{'measure':<21}{'peer':<22}{'peer':>9}{'quire':>9} {'':<7}{'ratio':>6}     target"
)


def targets(formats: dict[str, float]) -> dict[tuple[str, str], float]:
    """The same ratio against llama.cpp and its fork."""
    return {(name, peer): ratio for name, ratio in formats.items() for peer in (LLAMA, IK)}


def equal(n: int, n_in: int, n_out: int, least: dict[str, float]) -> Measure:
    """Decode of `n` sequences of one length."""
    name = "decode" if n == 1 else f"{n} sequences"
    return Measure(name, "decode", ((n_in, n_out),) * n, n, targets(least))


def traffic(path: str) -> Measure:
    """Requests of the lengths in a file, all at once, through a limited number of slots."""
    pairs = read_lengths(path, TRAFFIC_REQUESTS)
    scaled = tuple((max(1, round(TRAFFIC_SCALE * a)), max(1, round(TRAFFIC_SCALE * b))) for a, b in pairs)
    least = {(name, peer): ratio for name in FORMATS for peer, ratio in ((LLAMA, 1.5), (HF, 2.0))}
    return Measure("traffic", "total", scaled, TRAFFIC_SLOTS, least, (LLAMA, HF))


def measures(model: str, quick: bool, lengths: str, n_out: int) -> Sequence[Measure]:
    """What is measured of a model, in the order of the table. lengths: file for `traffic`, or empty. n_out: tokens of a
    sequence."""
    if model == "demo":
        return [Measure("decode", "decode", ((128, 128),), 1, {}, (LLAMA,), least=1500.0)]
    if has_experts(model):
        found = [equal(n, 128, n_out, {"4-bit": least}) for n, least in ((1, 1.3), (8, 2.5))]
        return [dataclasses.replace(one, peers=(LLAMA,)) for one in found]
    prefill = targets({"bf16": 1.5, "8-bit": 4.0, "4-bit": 2.5})
    found = [
        equal(1, 128, n_out, {"bf16": 1.05, "8-bit": 1.35, "4-bit": 1.45}),
        Measure("prefill 512", "prefill", ((512, 1),), 1, prefill),
    ]
    if quick:
        return [*found, equal(8, n_out, n_out, {"bf16": 1.5, "8-bit": 3.0})]
    found += [equal(n, 128, n_out, {"bf16": 1.5, "8-bit": 3.0} if n > 4 else {}) for n in (4, 8, 16)]
    found.append(Measure("decode, core busy", "decode", ((128, 64),), 1, {}, (LLAMA,), busy=True))
    return [*found, traffic(lengths)] if lengths else found
