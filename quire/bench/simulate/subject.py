"""What was simulated, before any figure: model, device and how far its times are known, ranks, workload, replicas.

Owns those facts and their lines. Does not own what a time is (`planner/cost`) nor its error bar (`planner/error_bar`).
"""

from __future__ import annotations

import math
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any, Final

from quire.bench.shape import FOLDER, PREFIX
from quire.bench.simulate.options import SimulateOptions
from quire.bench.simulate.requests import SimRequest, rate_of
from quire.bench.simulate.session import Variant
from quire.config.mesh import Mesh, mesh_of
from quire.config.resolve import DEFAULT_SEQS
from quire.core.counts import format_count
from quire.core.units import format_bytes
from quire.planner.accelerators import accelerator_named
from quire.planner.error_bar import error_bar, error_words
from quire.planner.expert_loads import EVEN

WIDTH: Final = 12
COMPUTED: Final = "; of several GPUs only dense models on H200s were ever measured"
EAGER: Final = ", and their decode steps are not captured in graphs: what launches take beyond that is not in them"
LONG: Final = ", and steps that send experts many bytes, or have prompts, are not captured: that is not in them either"
Facts = dict[str, Any]


def subject(variant: Variant, requests: Sequence[SimRequest]) -> Facts:
    """Of one variant, as plain values."""
    options, machine = variant.options, variant.machine
    mesh = mesh_of(machine.config)
    return {
        "model": _model_name(machine.config.model), "n_parameters": machine.arch.n_parameters,
        "dtype": machine.limits.dtype, "weights": machine.cost.timer.formats.weights.name, **_device(variant),
        "memory_bytes": options.memory_bytes, "memory_is_assumed": options.memory_is_assumed,
        "n_ranks": mesh.n_ranks, "n_stages": mesh.pp, "mesh": mesh.words, "ranks": _ranks(mesh),
        "experts": _experts(variant), "sequences": _sequences(variant),
        "times": _times(mesh), "workload": _workload(options), "n_requests": len(requests),
        "arrivals": _arrivals(options, requests), "replicas": options.replicas, "router": options.router,
    }  # fmt: skip


def lines(variants: Sequence[Variant], requests: Sequence[SimRequest]) -> Iterator[str]:
    """Of the first variant; of the others, what was not said yet."""
    first = _rows(subject(variants[0], requests))
    yield from (f"{name:<{WIDTH}}{text}" for name, text in first.items())
    told = set(first.items())
    for variant in variants[1:]:
        for name, text in _rows(subject(variant, requests)).items():
            if (name, text) not in told:
                told.add((name, text))
                yield f"{name:<{WIDTH}}{text} (with {variant.name})"
    yield ""


def _rows(facts: Facts) -> dict[str, str]:
    error = "how far they are off is not known" if facts["error"] is None else f"times ± {100 * facts['error']:.0f} %"
    memory = format_bytes(facts["memory_bytes"])
    memory += " (assumed; --gpu-memory says another)" if facts["memory_is_assumed"] else ""
    weights = "" if facts["weights"] == facts["dtype"] else f", weights in {facts['weights']}"
    router = f", chosen by {facts['router']}" if facts["replicas"] > 1 else ""
    return {
        "model": f"{facts['model']}, {format_count(facts['n_parameters'])} parameters in {facts['dtype']}{weights}",
        "device": f"{facts['device']}, {memory}; {error}",
        "times": facts["source"] + facts["times"],
        "ranks": facts["ranks"],
        **{name: facts[name] for name in ("experts", "sequences") if facts[name]},
        "workload": f"{facts['workload']}: {facts['n_requests']:,} requests, {facts['arrivals']}",
        "replicas": f"{facts['replicas']:,}{router}",
    }


def _ranks(mesh: Mesh) -> str:
    """What each has."""
    found = []
    if mesh.dp > 1:
        found.append(f"{mesh.dp} data-parallel ranks" + (", experts divided among all" if mesh.sends_rows else ""))
    if mesh.pp > 1:
        found.append(f"{mesh.pp} stages of layers")
    if mesh.tp > 1:
        found.append(f"{mesh.tp} GPUs share each layer")
    if mesh.n_token_ranks > 1:
        ways = [f"{n} {what}" for n, what in ((mesh.sp, "with heads of their own"), (mesh.ring, "in turn")) if n > 1]
        found.append(f"{mesh.n_token_ranks} GPUs share the tokens of long steps, {' times '.join(ways)}")
    return ", ".join(found) or "one device"


def _experts(variant: Variant) -> str:
    """How they are chosen, and when they move; empty: evenly, and never."""
    loads, moves = variant.options.expert_loads or EVEN, variant.machine.moves
    if moves is None:
        return "" if loads == EVEN else f"chosen as in {loads}"
    still_ms = 1e3 * (moves.choice_s + moves.n_layers * moves.layer_s)
    return (
        f"chosen as in {loads}; {moves.n_layers} layers move from step {moves.first_step:,} on, steps stand still for"
        f" {still_ms:,.0f} ms in all"
    )


def _sequences(variant: Variant) -> str:
    """How many at once, where fewer than usual fit; empty: as many as usual, or as asked."""
    machine = variant.machine
    usual = machine.config.max_num_seqs or DEFAULT_SEQS[machine.device]
    n = machine.limits.max_num_seqs
    if n == usual:
        return ""
    return f"{n:,} at once, as states of {usual:,} leave too little; quire serve chooses likewise"


def _times(mesh: Mesh) -> str:
    """What of them was not measured."""
    if mesh.n_ranks == mesh.dp and not mesh.sends_rows:
        return ""
    return COMPUTED + (EAGER if mesh.ring > 1 else LONG if mesh.sends_rows else "")


def _model_name(model: str) -> str:
    path = pathlib.Path(model)
    return PREFIX + path.name if path.parent == FOLDER else model


def _device(variant: Variant) -> Facts:
    """Its name, how far its times may be off, and where they are from."""
    timer = variant.machine.cost.timer
    name, source, error = variant.options.gpu, timer.calibration.source, error_bar(timer)
    if timer.calibration.is_assumed:
        source = f"assumed, never measured{source.removeprefix('assumed')}"
    else:
        source = f"measured: {source}"
    if name != "cpu":
        device = accelerator_named(name)
        name = device.name
        if not device.runs:
            source += "; Quire has no kernels for it"
    if words := error_words(timer):
        source += f"; {words}"
    return {"device": name, "error": error if math.isfinite(error) else None, "source": source}


def _workload(options: SimulateOptions) -> str:
    if options.trace:
        return f"trace {options.trace}"
    if options.workload != "none":
        return options.workload
    if options.dataset_name == "lengths":
        return f"lengths of {options.dataset_path}"
    return f"{options.dataset_name}, {options.input_len:,} tokens in, {options.output_len:,} out"


def _arrivals(options: SimulateOptions, requests: Sequence[SimRequest]) -> str:
    if options.capacity:
        return "at the highest rate that keeps the SLO"
    if options.request_rate:
        rates = ["all at once" if math.isinf(rate) else f"{rate:g} a second" for rate in options.request_rate]
        return ", ".join(rates)
    if options.baselines:
        return "at shares of what the engine does of all at once"
    rate = rate_of(requests)
    return "all at once" if math.isinf(rate) else f"at their own times, {rate:.3g} a second"
