"""A plan as plain values: everything that the command prints, draws and writes as JSON.

Owns what is in a plan. Does not own how it looks (`tables`, `chart`).
"""

from __future__ import annotations

import math
from typing import Any

from quire.config.mesh import Mesh
from quire.core.plan import Spans
from quire.planner.command import format_refusal, mesh_refusal, n_hosts, serve_command
from quire.planner.communication import step_transfers
from quire.planner.error_bar import NARROWEST, error_bar, error_words
from quire.planner.expert_loads import spread
from quire.planner.operators import Kind, decode_spans, prefill_spans, step_operators, totals
from quire.planner.parts import active_parameters, parameters_by_part, rank_parts
from quire.planner.placement import Placement
from quire.planner.search import Candidate, Task, candidates, least_devices
from quire.planner.shape import kv_numbers_per_token, pair_flops
from quire.planner.timing import StepTimer
from quire.planner.workload import dollars_per_million

TRAINING_FACTOR = 3
"""Forward and backward, to forward alone (Kaplan et al. 2020, table 1)."""
MEASURED = "of -tp 2 the 8B was measured, of -tp 4 the 8B and the 70B"
SUMS = "sums as timed on four H200s; for the rest "
MEASURED_HERE = "measured here"
"""How the source of an accelerator begins that is this machine's."""
PROMPT = 1024
"""Tokens of the prompt whose operators are listed."""


def model_facts(task: Task) -> dict[str, Any]:
    """What a model is, whatever runs it."""
    arch, formats = task.arch, task.formats
    numbers = kv_numbers_per_token(arch)
    token_flops = totals(step_operators(arch, decode_spans(1, 1)))[1]
    prompt_flops = totals(step_operators(arch, prefill_spans(PROMPT)))[1]
    return {
        "family": arch.family,
        "layers": arch.n_layers,
        "parameters": sum(parameters_by_part(arch).values()),
        "active_parameters": active_parameters(arch),
        "parameters_by_part": parameters_by_part(arch),
        "flops_token": token_flops,
        "flops_pair": pair_flops(arch),
        "flops_prompt": {"tokens": PROMPT, "flops": prompt_flops},
        "flops_training_token": TRAINING_FACTOR * token_flops,
        "kv_bytes_token": numbers * formats.kv_itemsize(arch.head_dim),
        "state_bytes_seq": sum(spec.n_bytes(formats.itemsize) for spec in arch.state_specs.values()),
        "weights_bytes": rank_parts(arch, Mesh(), formats).weights_bytes,
        "max_position": arch.max_position,
        **({"codings": {"words": arch.codings.words, "becomes": _becomes(task)}} if arch.codings else {}),
    }


def _becomes(task: Task) -> str:
    """What is made of a quantised checkpoint."""
    formats = task.formats
    if formats.coded is not None:
        return f"kept so where it is quantised, as {formats.weights.name}"
    if task.weights == "auto":
        return f"decoded on {'a CPU' if task.device.is_host else f'the {task.device.name.upper()}'}"
    return f"in {formats.weights.name}, as asked"


def operator_rows(task: Task, mesh: Mesh, spans: Spans) -> list[dict[str, Any]]:
    """Each with its intensity, and what binds it on the device."""
    n_rows, n_wants = sum(spans.lengths), sum(spans.wants)
    sent_us = iter([row["us"] for row in communication_rows(task, mesh, n_rows, n_wants)])
    rows, ceilings = [], task.calibration
    for one in step_operators(task.arch, spans, mesh, task.formats, parts=task.parts(mesh)):
        memory_s, arithmetic_s = one.n_bytes / ceilings.read_bytes_per_s, one.n_flops / ceilings.rate(one.products)
        rows.append({
            "operator": one.name, "kind": one.kind.value, "times": one.n_times, "bytes": one.n_bytes,
            "flops": one.n_flops, "wire_bytes": one.wire_bytes, "intensity": one.intensity,
            "limit_us": next(sent_us) if one.kind is Kind.COLLECTIVE
            else 1e6 * one.limit_s(ceilings),
            "bound": "wire" if one.kind is Kind.COLLECTIVE else "memory" if memory_s >= arithmetic_s else "arithmetic",
        })  # fmt: skip
    return rows


def communication_rows(task: Task, mesh: Mesh, n_rows: float, n_wants: int) -> list[dict[str, Any]]:
    """What a step of so many rows sends, and for how long."""
    links = task.device.links if mesh.n_ranks > 1 else None
    timer = StepTimer(task.arch, task.calibration, task.formats, mesh, links, task.parts(mesh))
    return [
        {"name": one.name, "pattern": one.pattern.value, "ranks": one.n_ranks, "times": one.n_times,
         "bytes": one.n_bytes, "us": 1e6 * one.n_times * timer.transfer_s(one)}
        for one in step_transfers(timer.parts, mesh, n_rows, n_wants, task.formats.itemsize)
    ]  # fmt: skip


def memory_facts(placement: Placement, task: Task) -> dict[str, Any]:
    """Of the fullest rank."""
    longest = task.workload.longest
    return {
        "budget_bytes": placement.budget_bytes, "terms": placement.terms, "page_bytes": placement.page_bytes,
        "pages": max(0, placement.n_pages), "kv_tokens": placement.pool_tokens, "fits": placement.fits,
        "max_num_seqs": placement.equation.max_num_seqs, "asked_num_seqs": task.limits.max_num_seqs,
        "lacking_bytes": max(0, placement.lacking_bytes),
        "largest_batch": placement.seqs_within(longest, task.workload.shared), "batch_tokens": longest,
        "longest_context": min(placement.longest, task.arch.max_position_scaled),
    }  # fmt: skip


def expert_facts(task: Task, mesh: Mesh) -> dict[str, Any]:
    """How evenly the ranks of a mesh have experts to compute; empty: evenly, or the model has none."""
    experts = next((one for one in task.parts(mesh).products if one.is_experts), None)
    if experts is None or task.loads.are_plain:
        return {}
    found = spread(task.loads, experts.n_of_all, experts.n_chosen, mesh.ep)
    return {
        "loads": task.loads.words, "ranks": mesh.ep, "copies": task.loads.copies(mesh.ep),
        "moved": task.loads.n_redundant is not None and mesh.ep > 1, "imbalance": found.imbalance,
        "imbalance_in_turn": found.in_turn,
    }  # fmt: skip


def candidate_facts(one: Candidate, task: Task, price: float) -> dict[str, Any]:
    """One line of the table of meshes."""
    point = one.best or one.nearest
    error = error_bar(StepTimer(task.arch, task.calibration, task.formats, one.mesh, parts=task.parts(one.mesh)))
    found: dict[str, Any] = {"mesh": one.mesh.words, "fits": one.placement.fits, "meets_slo": one.best is not None,
                             "refusal": one.refusal}  # fmt: skip
    if point is None:
        return found
    speed = point.tokens_per_s
    found |= {
        "concurrency": point.n_seqs * one.mesh.dp, "ttft_ms": 1e3 * point.ttft_s, "tpot_ms": 1e3 * point.tpot_s,
        "tokens_per_s": speed, "requests_per_s": point.requests_per_s, "error": error,
    }  # fmt: skip
    if price and one.best:
        dollars = dollars_per_million(price, one.mesh.n_ranks, speed)
        found |= {"dollars_per_million": dollars if math.isfinite(dollars) else None}
    return found


def plan(task: Task, model: str, n_devices: int, mesh: Mesh | None, price: float) -> dict[str, Any]:
    """Everything. ConfigError where no mesh of so many devices can divide the model."""
    found, refused = candidates(task, n_devices, mesh)
    facts: dict[str, Any] = {"model": model, "facts": model_facts(task)}
    facts["device"] = {
        "name": task.device.name, "count": n_devices, "memory_bytes": task.device.memory_bytes,
        "read_bytes_per_s": task.calibration.read_bytes_per_s, "flops_per_s": task.calibration.flops_per_s,
        "source": task.calibration.source, "peaks": task.device.source,
    }  # fmt: skip
    facts["workload"] = {"name": task.workload.name, "meaning": task.workload.meaning,
                         "slo": task.objective.words}  # fmt: skip
    facts["refused"] = refused
    facts["meshes"] = [candidate_facts(one, task, price) for one in found]
    if not found:
        return facts
    first = found[0]
    facts["memory"] = memory_facts(first.placement, task)
    if experts := expert_facts(task, first.mesh):
        facts["experts"] = experts
    context = round(task.workload.shared + task.workload.input + task.workload.output / 2)
    point = first.best or first.nearest
    n_seqs = point.n_seqs if point else 1
    steps = {"decode": decode_spans(n_seqs, context), "prefill": prefill_spans(PROMPT)}
    facts["steps"] = {name: operator_rows(task, first.mesh, spans) for name, spans in steps.items()}
    facts["step_spans"] = {"decode": [n_seqs, context], "prefill": [1, PROMPT]}
    if first.mesh.n_ranks > 1:
        facts["communication"] = communication_rows(task, first.mesh, n_seqs, n_seqs)
    facts["frontier"] = [
        {"concurrency": one.n_seqs, "tpot_ms": 1e3 * one.tpot_s, "ttft_ms": 1e3 * one.ttft_s,
         "tokens_per_s": one.tokens_per_s}
        for one in first.points
    ]  # fmt: skip
    least, other = (None, None) if point else least_devices(task)
    facts["least"], facts["least_other"] = (
        None if mesh is None else {"mesh": mesh.words, "devices": mesh.n_ranks,
                                   "refusal": mesh_refusal(mesh, task.device, task.arch)}
        for mesh in (least, other)
    )  # fmt: skip
    facts["cannot"] = first.refusal or format_refusal(task.formats, task.device, task.arch)
    if first.nearest:
        facts["missed"] = {"slo": task.objective.words, **facts["meshes"][0]}
    if first.best and not facts["cannot"]:
        facts["command"], unsaid = serve_command(
            model, first.mesh, task.formats, max_num_seqs=n_seqs,
            max_model_len=min(task.limits.max_model_len or task.arch.max_position, max(1, first.placement.longest)),
            quantization=task.weights, is_host=task.device.is_host, n_redundant=task.loads.n_redundant,
            is_coded=task.arch.codings is not None, n_nodes=n_hosts(first.mesh, task.device),
        )  # fmt: skip
    else:
        unsaid = []
    facts["unknown"] = unknowns(task, first) + unsaid
    return facts


def _was_measured(task: Task, mesh: Mesh) -> bool:
    """Two or four devices that share layers, of a kind of which as many were measured."""
    is_assumed = task.calibration.is_assumed
    return not is_assumed and mesh.tp in (2, 4) and mesh.n_ranks == mesh.tp * mesh.dp and mesh.ep in (1, mesh.tp)


def unknowns(task: Task, first: Candidate) -> list[str]:
    """What the figures stand on that nobody measured."""
    found = []
    name = task.device.name.upper()
    if task.calibration.is_assumed:
        found.append(
            f"no step was ever timed on the {name}: its peaks are"
            f" {'measured just now' if task.device.source.startswith(MEASURED_HERE) else 'published'}, how much of them"
            " is reached is assumed"
        )
    if task.arch.hidden_size < NARROWEST:
        found.append("so small a model: steps of larger ones were timed, and fixed costs weigh most here")
    if not task.device.runs:
        found.append(f"Quire has no kernels for the {name}: its figures say what the hardware would allow")
    timer = StepTimer(task.arch, task.calibration, task.formats, first.mesh, parts=task.parts(first.mesh))
    found += [words] if (words := error_words(timer)) else []
    if first.mesh.n_ranks > first.mesh.dp:
        sums = SUMS if task.calibration.sums else ""
        found.append(
            f"collectives: {first.mesh.words} is computed from the links' peaks ({sums}"
            f"{task.device.links.share:.0%} of them assumed) and a latency for each;"
            f" {MEASURED if _was_measured(task, first.mesh) else 'it was not measured'}"
        )
    weights = task.formats.weights
    if weights.is_rounded and weights.name not in task.calibration.products | task.calibration.experts:
        found.append(
            f"products of {weights.name} weights: those of a format of as many bits, or bfloat16's, are assumed"
        )
    parts = task.parts(first.mesh)
    if parts.states:
        found.append("recurrent layers: their kernels' efficiency is assumed")
    if any(one.is_experts for one in parts.products) and task.loads.are_plain:
        found.append(
            "experts: chosen evenly; skewed routing reads fewer and waits for the fullest: --expert-loads zipf:1.0, or"
            " loads of your own in a file"
        )
    return found
