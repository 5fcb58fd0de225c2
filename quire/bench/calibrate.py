"""`quire bench calibrate`: times steps of the engine on this machine and fits the planner's calibration to them.

Owns which steps are timed and in which order. Does not own the search (`planner/fitting`). Models are bundled shapes
with fewer layers and random weights. A busy machine only makes steps longer, so of each step the fast ones count.
What its knobs find of the H200's own expected steps is tested.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import os
import pathlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import torch

from quire.bench.ceilings import probe
from quire.bench.datasets import from_lengths
from quire.bench.kernels.timing import timer
from quire.bench.offline import TimedRun, decode_step_times_s, decode_steps, timed_run
from quire.bench.shape import PREFIX, shape_options
from quire.config.engine import EngineConfig
from quire.config.mesh import Mesh
from quire.config.model import read_arch
from quire.config.options import make_options
from quire.core import host
from quire.core.plan import Spans
from quire.core.ticker import ticked
from quire.engine.llm import LLM
from quire.planner.accelerators import accelerator_seen
from quire.planner.calibration import Calibration, Curve, Record, calibration_of
from quire.planner.error_bar import NARROW as NARROW_KIND
from quire.planner.error_bar import kinds_of
from quire.planner.fitting import Knob, Sample, fit
from quire.planner.formats import formats_named
from quire.planner.operators import prefill_spans, step_operators, totals
from quire.planner.timing import StepTimer

VOCABULARY = 1000
MAX_TOKENS = 1 << 18
"""Prompt tokens of a batch that decodes, at most."""
OF_STEPS = (
    "device", "source", "read_bytes_per_s", "attention", "row_kernels", "step_s", "row_s", "first_token_s", "captured",
)  # fmt: skip
"""What the steps of a GPU tell, beside products in bfloat16."""
MOST_ERROR = 0.25
"""Of nine steps of ten; beyond it other programs were measured."""
NARROW = {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4, "num_key_value_heads": 2}
"""As the demo has them."""
FEW = 4
"""Errors of which nine tenths say nothing."""
QUIET_SHARE = 0.05
"""Of the cores: so much others may use without being spoken of."""
NARROW_WEIGHT = 0.05
"""Of its steps in the fit: their weights lie in a cache, which the model of time does not know. They are to tell fixed
costs that larger steps leave open, and nothing else."""
FAST_SHARE = 4
"""Of the times of a step, the median of the fastest quarter counts."""


@dataclasses.dataclass(frozen=True, slots=True)
class Model:
    """What is loaded: a shape with some of its layers."""

    shape: str
    n_layers: int
    quantization: str
    vocab_size: int = 32_768
    """Rows of the head: fewer than the shape's, to load and multiply less of what is like any product."""
    narrow: bool = False
    """With layers of the size of the demo's, of which little but fixed costs is seen."""

    @property
    def overrides(self) -> dict[str, Any]:
        """`hf_overrides`."""
        return {"num_hidden_layers": self.n_layers, "vocab_size": self.vocab_size, "eos_token_id": 2,
                "bos_token_id": 1} | (NARROW if self.narrow else {})  # fmt: skip

    @property
    def title(self) -> str:
        """For people."""
        return f"{'narrow ' * self.narrow}{self.shape} {self.n_layers} layers {self.quantization}"


@dataclasses.dataclass(frozen=True, slots=True)
class Cases:
    """What is timed on a kind of device."""

    models: tuple[Model, ...]
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    """Prompt tokens of batches that decode."""
    prompts: tuple[int, ...]
    rows: tuple[int, ...]
    """Knots of the curve of products."""
    fixed: tuple[int, ...] = (0,)
    """Knots whose fixed cost is fitted: elsewhere it cannot be told from what binds there."""
    rates: tuple[int, ...] = (1, 2, 3, 4)
    """Knots whose rate of arithmetic is fitted: with fewer rows reading the matrix binds."""
    tile: int = 1
    """Rows that products take at once, see `Curve.tile`."""
    output_len: int = 24
    """Of a batch that decodes. Its prompts come in steps of `max_num_batched_tokens`, and who is first must not have
    ended when the last one is there."""
    max_len: int = 2048
    decode_rounds: int = 1 << 30
    """Rounds in which batches that decode are timed, at most: prompts of theirs take most of the time, and each round
    times many steps."""


CASES = {
    "cpu": Cases(
        models=(
            Model("qwen3-0.6b", 3, "none"), Model("llama-3.2-1b", 2, "none"),
            Model("qwen3-0.6b", 3, "int8"), Model("llama-3.2-1b", 2, "int8"),
            Model("llama-3.2-1b", 8, "none", vocab_size=4096, narrow=True),
        ),
        batches=(1, 4, 16), contexts=(64, 384), prompts=(64, 512), rows=(1, 4, 16, 64, 256),
    ),
    "cuda": Cases(
        models=(Model("qwen3-0.6b", 28, "none"), Model("llama-3.1-8b", 16, "none")),
        batches=(1, 8, 32, 128, 256, 512), contexts=(128, 1024), prompts=(128, 512, 1024, 2040, 8184),
        rows=(1, 32, 256, 512, 1024, 2040, 8184), fixed=(0, 1, 2, 3), rates=(2, 3, 4, 5, 6), tile=64,
        output_len=64, max_len=8192, decode_rounds=2,
    ),
}  # fmt: skip


def calibrate(
    device: str, rounds: int, say: Callable[[str], None], time_limit_s: float = 0.0
) -> tuple[Calibration, list[Sample]]:
    """The calibration of this machine, and what it was fitted to. device: 'cpu' or 'cuda'. time_limit_s: after it no
    further turn begins; each step is timed once at least. 0: there is none."""
    begin_s, cases, others = time.perf_counter(), CASES[device], Others()
    clock = timer(device)
    dtypes = [torch.bfloat16, torch.int8] if device == "cpu" else [torch.bfloat16]
    ceilings = probe(clock, dtypes)
    say(f"reads {ceilings.read_bytes_per_s / 1e9:.1f} GB/s; products " + ", ".join(
        f"{kind} {rate / 1e12:.2f} T/s" for kind, rate in ceilings.flops_per_s.items()))  # fmt: skip
    samples: list[Sample] = []
    for number, model in enumerate(cases.models, start=1):
        end_s = begin_s + time_limit_s * number / len(cases.models) if time_limit_s else math.inf
        samples += _samples(model, device, cases, rounds, end_s)
        say(f"{model.title}: {len(samples)} steps timed so far")
    flops, best = dict(ceilings.flops_per_s), ceilings.read_bytes_per_s
    for one in samples:  # a ceiling that was probed in a busy moment is at least what a step reached
        n_bytes, n_flops, _ = totals(step_operators(one.arch, one.spans, formats=one.formats))
        kind = one.formats.weights.products
        best = max(best, n_bytes / one.seconds)
        flops[kind] = max(flops[kind], n_flops / one.seconds)
    found = fit(_start(ceilings.device, best, flops, cases, device), samples, _knobs(flops, cases))
    errors: dict[frozenset[str], list[float]] = collections.defaultdict(list)
    for one in samples:
        kinds = kinds_of(StepTimer(one.arch, found, one.formats, Mesh()))
        errors[kinds].append(abs(one.expected_s(found) / one.seconds - 1))
    error = nine_of_ten([x for kinds, some in errors.items() if NARROW_KIND not in kinds for x in some])
    source = f"quire bench calibrate: {len(samples)} steps on {ceilings.device}, nine of ten within {100 * error:.1f} %"
    share = others.share() if device == "cpu" else 0.0
    if share > QUIET_SHARE:
        source += f"; other programs used {100 * share:.0f} % of the cores meanwhile"
        error = round(max(error, share / (1 - share)), 3)
    own = tuple(
        Record(kinds=tuple(sorted(kinds)), n_figures=len(some),
               error=max(error, nine_of_ten(some)) if NARROW_KIND in kinds else error)
        for kinds, some in errors.items()
    )  # fmt: skip
    return msgspec.structs.replace(found, source=source, error=error, records=found.records or own), samples


def nine_of_ten(errors: Sequence[float]) -> float:
    """The error within which nine of ten are; of few the largest."""
    return round(max(0.02, statistics.quantiles(errors, n=10)[-1] if len(errors) > FEW else max(errors)), 3)


class Others:
    """How much of this machine's cores other programs use, from now on."""

    def __init__(self) -> None:
        self._before = self._figures()

    def share(self) -> float:
        """At most 0.9; 0 where the system does not say. Without them steps could take this share less."""
        others_s, wall_s = (now - before for now, before in zip(self._figures(), self._before, strict=True))
        return min(0.9, max(0.0, others_s / (wall_s * (os.cpu_count() or 1))))

    @staticmethod
    def _figures() -> tuple[float, float]:
        return host.busy_s() - sum(os.times()[:4]), time.perf_counter()


def _start(name: str, reads: float, flops: dict[str, float], cases: Cases, device: str) -> Calibration:
    """Where the search begins: near the ceilings. What no step here tells of a GPU (experts, rounded weights, latent
    lines, sums over ranks, the host) is as in the calibration that comes with Quire, where there is one of it."""
    n = len(cases.rows)
    curve = Curve(rows=cases.rows, fixed_s=(3e-6,) * n, bytes_share=0.9, flops_share=(0.7,) * n, tile=cases.tile)
    found = Calibration(
        device="cpu" if device == "cpu" else name.lower(), source="", read_bytes_per_s=reads,
        flops_per_s=flops, products=dict.fromkeys(flops, curve) | (
            {"int8": msgspec.structs.replace(curve, row_number_s=1e-10)} if "int8" in flops else {}
        ),
        experts={"bfloat16": curve},
        attention=Curve(rows=(1, 256), fixed_s=(5e-6, 2e-5), bytes_share=0.7, flops_share=(0.3,)),
        state=Curve(fixed_s=(5e-6,), bytes_share=0.5, flops_share=(0.1,)),
        row_kernels=Curve(rows=(1, 64), fixed_s=(2e-6, 5e-6)), step_s=1e-4, row_s=1e-6, first_token_s=1e-3,
        captured=0 if device == "cpu" else 1024,
    )  # fmt: skip
    seen = None if device == "cpu" else accelerator_seen(name)
    if seen is None:
        return found
    published = {kind: rate / seen.flops_per_s["bfloat16"] for kind, rate in seen.flops_per_s.items()}
    rates = {kind: share * flops["bfloat16"] for kind, share in published.items()} | flops
    known = calibration_of(seen.name)
    if known is not None:
        own = {field: getattr(found, field) for field in OF_STEPS} | {"products": known.products | found.products}
        rates = {kind: rate / known.rate("bfloat16") * flops["bfloat16"] for kind, rate in known.flops_per_s.items()}
        found = msgspec.structs.replace(known, **own)
    return msgspec.structs.replace(found, flops_per_s=rates)


def _knobs(flops: dict[str, float], cases: Cases) -> list[Knob]:
    """Those of a CPU or a GPU, see `Cases`."""
    found: list[Knob] = [("step_s", "", 0), ("row_s", "", 0), ("first_token_s", "", 0)]
    for kind in flops:
        curve = [("bytes_share", 0), *(("fixed_s", i) for i in cases.fixed), *(("flops_share", i) for i in cases.rates)]
        found += [(f"products.{kind}", field, place) for field, place in curve]
    found += [("products.int8", "row_number_s", 0)] if "int8" in flops else []
    found += [("attention", "fixed_s", 0), ("attention", "bytes_share", 0), ("attention", "flops_share", 0)]
    return [*found, ("row_kernels", "fixed_s", 1)]


def _samples(model: Model, device: str, cases: Cases, rounds: int, end_s: float = math.inf) -> list[Sample]:
    """Each case in turns with the others, so that a busy moment hits all. A batch that never decodes as a whole, as the
    pool does not hold it, is left out. end_s: see `calibrate`."""
    options = shape_options(PREFIX + model.shape)
    arch = read_arch(pathlib.Path(str(options["model"])), model.overrides)
    config = make_options(EngineConfig, options | {
        "hf_overrides": model.overrides, "device": device, "dtype": "bfloat16", "quantization": model.quantization,
        "max_model_len": cases.max_len, "max_num_seqs": max(cases.batches), "disable_log_stats": True,
        "enable_prefix_caching": False,
    })  # fmt: skip
    llm = LLM.of_command_line(config)
    weights = "auto" if model.quantization == "none" else model.quantization
    formats = formats_named(weights, "auto", "bfloat16")
    n = 1 if model.narrow else None  # one sequence tells fixed costs best
    shapes = [
        (batch, context, cases.output_len)
        for context in cases.contexts for batch in cases.batches[:n] if batch * context <= MAX_TOKENS
    ]  # fmt: skip
    shapes += [(1, prompt, 1) for prompt in cases.prompts[:n]]
    times: dict[tuple[int, int, int], list[float]] = {shape: [] for shape in shapes}
    spans: dict[tuple[int, int, int], Spans] = {}
    try:
        for turn in ticked(range(rounds + 1), f"turns of {model.title}"):
            if turn > 1 and time.perf_counter() > end_s:
                break
            for shape in shapes:
                batch, n_in, n_out = shape
                if n_out > 1 and turn > cases.decode_rounds:
                    continue
                dataset = from_lengths([(n_in, n_out)] * batch, min(VOCABULARY, model.vocab_size), f"calibrate/{shape}")
                run = timed_run(llm, dataset(turn), temperature=0.0)
                found = list(_seconds(run, batch, n_out))
                if turn and found:  # the first turn warms up
                    times[shape] += found
                    spans[shape] = _spans(run, batch, n_in, n_out)
    finally:
        llm.shutdown()
    return [
        Sample(name=f"{model.title}: {batch} x {n_in}{'' if n_out > 1 else ' prompt'}", arch=arch, formats=formats,
               spans=spans[batch, n_in, n_out], seconds=_fast(times[batch, n_in, n_out]), waits=n_out == 1,
               weight=NARROW_WEIGHT if model.narrow else 1.0)
        for batch, n_in, n_out in spans
    ]  # fmt: skip


def _seconds(run: TimedRun, batch: int, n_out: int) -> Iterator[float]:
    """Of decode steps of the whole batch, two of them in the mean, or until the first token. Where a step was heard of
    late, the next one seems the shorter: two in a row tell how long they took."""
    if n_out > 1:
        yield from (sum(pair) / 2 for pair in itertools.pairwise(decode_step_times_s(run.timeline, batch)))
    else:
        yield from (
            one.metrics.first_token_s - one.metrics.arrival_s for one in run.outputs if one.metrics.first_token_s
        )


def _spans(run: TimedRun, batch: int, n_in: int, n_out: int) -> Spans:
    """Of the step in the middle, or of the prompt."""
    if n_out == 1:
        return prefill_spans(n_in)
    steps = decode_steps(run.timeline, batch)
    return run.records[steps[len(steps) // 2]].spans


def _fast(times_s: Sequence[float]) -> float:
    """See `FAST_SHARE`."""
    return statistics.median(sorted(times_s)[: max(1, len(times_s) // FAST_SHARE)])


def lines(calibration: Calibration, samples: Sequence[Sample]) -> list[str]:
    """For people: each step beside what the fit expects, and whether that is worth anything."""
    text = [
        f"{one.name:<48}{1e3 * one.expected_s(calibration):10.3f} ms, measured {1e3 * one.seconds:10.3f}:"
        f" {100 * (one.expected_s(calibration) / one.seconds - 1):+6.1f} %"
        for one in samples
    ]
    if calibration.error > MOST_ERROR:
        text.append(
            "the steps contradict each other: this machine was busy. The file has that error in it, ±"
            f" {100 * calibration.error:.0f} %, and no plan made with it shows a smaller error bar; calibrate again"
            " when the machine rests"
        )
    return text
