"""A training plan in words: memory of the fullest device, FLOPs, time, traffic, what would fit instead.

Owns the table and its JSON. Does not own any figure (`plan`).
"""

from __future__ import annotations

from typing import Any

import msgspec

from quire.config.arch import ModelArch
from quire.core.counts import format_count, format_whole
from quire.core.units import format_bytes
from quire.planner.training.plan import OTHERS_BYTES, TrainingPlan, devices_needed, setups_that_fit, unknowns
from quire.planner.training.setup import OPTIMIZERS, Checkpointing, TrainingSetup

WIDTH = 16
"""Of the first column."""
MANY_DAYS = 1e6
"""From so many on, no tenths."""


def row(name: str, text: str) -> str:
    """A line of a table of two columns."""
    return f"{name:<{WIDTH}}{text}"


def memory_rows(plan: TrainingPlan) -> dict[str, float]:
    """What the fullest device has → bytes."""
    stage = plan.fullest
    rows = {
        "weights": stage.states.weights, "gradients": stage.states.gradients, "master weights": stage.states.master,
        "optimizer": stage.states.optimizer, "gathered": stage.gathered, "activations": stage.activations.layers,
        "head": stage.activations.ends, "working": stage.activations.working, "others": float(OTHERS_BYTES),
    }  # fmt: skip
    return {name: n_bytes for name, n_bytes in rows.items() if n_bytes}


def flags_of(setup: TrainingSetup) -> str:
    """The command line that says how the model is divided."""
    found = [f"--gpus {setup.n_devices}", f"--zero {setup.zero}", f"--checkpointing {setup.checkpointing.value}"]
    found += [f"--tp {setup.tensor_parallel}"] if setup.tensor_parallel > 1 else []
    found += [f"--pp {setup.pipeline_parallel}"] if setup.pipeline_parallel > 1 else []
    return " ".join(found)


def lines(arch: ModelArch, plan: TrainingPlan, n_tokens: float, why_tokens: str, price: float, loss: str) -> list[str]:
    """All of it. why_tokens: where their number comes from, or "". price: dollars of a device and hour; 0: not known.
    loss: what a law expects, or ""."""
    return [
        *_model(plan), "", *_memory(plan), *_advice(arch, plan), "", *_time(plan, n_tokens, why_tokens, price),
        *([row("loss", loss)] if loss else []), "",
        *_traffic(plan), "", *(row("" if i else "not known", text) for i, text in enumerate(unknowns(arch))),
    ]  # fmt: skip


def _model(plan: TrainingPlan) -> list[str]:
    setup, active = plan.setup, plan.n_active
    layout = f"{setup.n_replicas} replicas"
    layout += f" x {setup.tensor_parallel} tensor-parallel" if setup.tensor_parallel > 1 else ""
    layout += f" x {setup.pipeline_parallel} pipeline stages" if setup.pipeline_parallel > 1 else ""
    each = f"{format_whole(setup.n_micro_batches)} micro-batches of {setup.micro_batch} x {setup.seq_len:,} on each"
    return [
        row("model", f"{format_count(plan.n_parameters)} parameters, a token is multiplied by {format_count(active)}"),
        row("devices", f"{setup.n_devices:,} {plan.gpu.name}: {layout}; ZeRO {setup.zero}"),
        row("batch", f"{format_count(setup.step_tokens)} tokens: {each} replica"),
        row("kept", f"{_kept(setup)}; optimizer: {OPTIMIZERS[setup.optimizer].words}"),
    ]


def _kept(setup: TrainingSetup) -> str:
    if setup.checkpointing is Checkpointing.FULL:
        return "the input of each layer (full checkpointing)"
    scores = (
        "with the scores of attention" if setup.stores_scores else "attention's scores made again, as FlashAttention"
    )
    if setup.checkpointing is Checkpointing.SELECTIVE:
        scores = "attention's scores made again (selective checkpointing)"
    return f"activations of all layers, {scores}"


def _memory(plan: TrainingPlan) -> list[str]:
    total, has = plan.fullest.total, plan.gpu.memory_bytes
    where = ""
    if plan.setup.pipeline_parallel > 1:
        where = f", stage {plan.stages.index(plan.fullest) + 1} of {plan.setup.pipeline_parallel}"
    found = [f"memory of the fullest device{where}"]
    found += [f"  {name:<{WIDTH - 2}}{format_bytes(n):>12}" for name, n in memory_rows(plan).items()]
    verdict = "fits" if plan.fits else f"does NOT fit: {format_bytes(total - has)} too much"
    return [*found, f"  {'total':<{WIDTH - 2}}{format_bytes(total):>12} of {format_bytes(has)}: {verdict}"]


def _advice(arch: ModelArch, plan: TrainingPlan) -> list[str]:
    if plan.fits:
        return []
    other = next(setups_that_fit(arch, plan.setup, plan.gpu), None)
    if other is not None:
        return [row("what fits", flags_of(other))]
    n_devices = devices_needed(arch, plan.setup, plan.gpu)
    if n_devices is None or n_devices <= plan.setup.n_devices:
        return [row("what fits", "no number of these devices: take shorter sequences or smaller micro-batches")]
    return [row("what fits", f"no way to use {plan.setup.n_devices:,} devices; --gpus {n_devices} is the least")]


def _time(plan: TrainingPlan, n_tokens: float, why_tokens: str, price: float) -> list[str]:
    flops, setup = plan.flops, plan.setup
    executed = flops.executed(setup.checkpointing)
    parts = f"{flops.matrices / flops.forward:.0%} layers, {flops.pairs / flops.forward:.0%} attention"
    parts += f", {flops.head / flops.forward:.0%} head"
    again = f", {format_count(executed)} with what is computed again" if executed > flops.training else ""
    hours, days = plan.device_hours(n_tokens), plan.days(n_tokens)
    days_words = f"{days:,.1f}" if days < MANY_DAYS else format_whole(days)
    cost = f", ${format_whole(hours * price)} at ${price:g} an hour" if price else ""
    return [
        row("FLOPs", f"{format_count(flops.training)} a token ({parts}){again}"),
        row("", f"{n_tokens * flops.training:.3g} for {format_count(n_tokens)} tokens{why_tokens}"),
        row("speed", f"{plan.utilisation:.2f} of the peak, {plan.model_utilisation:.2f} without recomputation (MFU): "
            f"{format_count(plan.tokens_per_s)} tokens/s, {plan.step_s:.3g} s a step"),
        row("time", f"{days_words} days, {format_whole(hours)} device-hours{cost}"),
    ]  # fmt: skip


def _traffic(plan: TrainingPlan) -> list[str]:
    found, setup, sent = [], plan.setup, plan.traffic
    for name, n_bytes, seconds in (
        ("replicas", sent.data, sent.data_s), ("tensors", sent.tensor, sent.tensor_s),
        ("stages", sent.pipeline, sent.pipeline_s),
    ):  # fmt: skip
        if n_bytes:
            text = f"{format_bytes(n_bytes)}, at least {seconds:.3g} s of a step of {plan.step_s:.3g} s"
            found.append(f"  {name:<{WIDTH - 2}}{text}")
    longest_s = max(sent.data_s, sent.tensor_s, sent.pipeline_s)
    if longest_s > plan.step_s:  # however much hides behind arithmetic
        most = plan.utilisation * plan.step_s / longest_s
        text = f"so that a step takes {longest_s:.3g} s, at {most:.2g} of the peak, and not {plan.step_s:.3g} s"
        found.append(f"  {'too much':<{WIDTH - 2}}{text}")
    if setup.pipeline_parallel > 1:
        found.append(f"  {'bubble':<{WIDTH - 2}}{setup.bubble:.1%} of a step without interleaving")
    return ["each device sends", *found] if found else ["nothing is sent: one device"]


def as_json(arch: ModelArch, plan: TrainingPlan, n_tokens: float, price: float) -> dict[str, Any]:
    """The same as plain values, in bytes, seconds and dollars."""
    other = None if plan.fits else next(setups_that_fit(arch, plan.setup, plan.gpu), None)
    return {
        "n_parameters": plan.n_parameters, "n_active_parameters": plan.n_active, "gpu": plan.gpu.name,
        "setup": msgspec.to_builtins(plan.setup), "n_replicas": plan.setup.n_replicas,
        "step_tokens": plan.setup.step_tokens, "n_micro_batches": plan.setup.n_micro_batches,
        "bubble": plan.setup.bubble, "memory_bytes": memory_rows(plan) | {"total": plan.fullest.total},
        "device_memory_bytes": plan.gpu.memory_bytes, "fits": plan.fits,
        "fits_instead": None if other is None else flags_of(other),
        "flops_a_token": msgspec.to_builtins(plan.flops) | {
            "training": plan.flops.training, "executed": plan.flops.executed(plan.setup.checkpointing),
        },
        "utilisation": plan.utilisation, "model_utilisation": plan.model_utilisation,
        "tokens_per_s": plan.tokens_per_s, "step_s": plan.step_s, "n_tokens": n_tokens,
        "days": plan.days(n_tokens), "device_hours": plan.device_hours(n_tokens),
        "dollars": plan.device_hours(n_tokens) * price if price else None,
        "traffic": msgspec.to_builtins(plan.traffic), "not_known": unknowns(arch),
    }  # fmt: skip
