"""What was simulated, before any figure: model, device and how far its times are known, ranks, workload, replicas.

Owns those facts and their lines. Does not own what a time is (`planner/cost`) nor its error bar (`planner/report`).
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
from quire.config.mesh import mesh_of
from quire.core.counts import format_count
from quire.core.units import format_bytes
from quire.planner.accelerators import USUAL_CPU, accelerator_named
from quire.planner.report import error_bar

WIDTH: Final = 12
COMPUTED: Final = "; those of several GPUs are computed, never measured"
Facts = dict[str, Any]


def subject(variant: Variant, requests: Sequence[SimRequest]) -> Facts:
    """Of one variant, as plain values."""
    options, machine = variant.options, variant.machine
    mesh = mesh_of(machine.config)
    return {
        "model": _model_name(machine.config.model), "n_parameters": machine.arch.n_parameters,
        "dtype": machine.limits.dtype, **_device(variant), "memory_bytes": options.memory_bytes,
        "n_ranks": mesh.n_ranks, "n_stages": mesh.pp, "workload": _workload(options), "n_requests": len(requests),
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
    n_sharing, n_stages = facts["n_ranks"] // facts["n_stages"], facts["n_stages"]
    ranks = f"{n_sharing} GPUs share each layer" if n_sharing > 1 else "one device"
    if n_stages > 1:
        ranks = f"{n_stages} stages of layers" + (f", {ranks}" if n_sharing > 1 else "")
    router = f", chosen by {facts['router']}" if facts["replicas"] > 1 else ""
    return {
        "model": f"{facts['model']}, {format_count(facts['n_parameters'])} parameters in {facts['dtype']}",
        "device": f"{facts['device']}, {format_bytes(facts['memory_bytes'])}; {error}",
        "times": facts["source"] + (COMPUTED if facts["n_ranks"] > 1 else ""),
        "ranks": ranks,
        "workload": f"{facts['workload']}: {facts['n_requests']:,} requests, {facts['arrivals']}",
        "replicas": f"{facts['replicas']:,}{router}",
    }


def _model_name(model: str) -> str:
    path = pathlib.Path(model)
    return PREFIX + path.name if path.parent == FOLDER else model


def _device(variant: Variant) -> Facts:
    """Its name, how far its times may be off, and where they are from."""
    timer = variant.machine.cost.timer
    name, source, error = variant.options.gpu, timer.calibration.source, error_bar(timer)
    if source.startswith("assumed"):
        source = f"assumed, never measured{source.removeprefix('assumed')}"
    else:
        source = f"measured: {source}"
    if timer.calibration is not USUAL_CPU:
        device = accelerator_named(name)
        name = device.name
        if not device.runs:
            source += "; Quire has no kernels for it"
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
