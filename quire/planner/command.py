"""The command line that serves a plan, or why this version cannot serve it.

Owns the words. Invariant: every command can be read as an `EngineConfig` of that mesh.
"""

from __future__ import annotations

import json
import shlex
import typing
from typing import Final

from quire.config.arch import ModelArch
from quire.config.engine import EngineConfig
from quire.config.mesh import Mesh
from quire.config.resolve import kv_dtype, rounds_to
from quire.core.errors import ConfigError
from quire.planner.accelerators import Accelerator
from quire.planner.formats import FLOATING, Formats

READ: Final = {"fp8-block128": ("cuda",), "mxfp4": ("cuda",), "nvfp4": ("cuda",)}
"""Formats of checkpoints, to which the engine does not round → on what they stay as they are (docs/quantization.md)."""
MOST_RANKS: Final = 64
"""Of one engine."""


def mesh_refusal(mesh: Mesh, device: Accelerator, arch: ModelArch, *, moves_experts: bool = False) -> str:
    """Why this engine has no such mesh for a model; empty: it has, replicas as engines of their own. moves_experts:
    between ranks that divide them."""
    if moves_experts and mesh.ep > 1 and mesh.pp > 1:
        return f"pp = {mesh.pp}: the engine does not move experts of stages"
    if mesh.n_token_ranks > 1 and mesh.tp * mesh.pp * mesh.ep > 1:
        return f"{mesh.words}: ranks that divide tokens (sp, ring) do not divide layers or experts as well"
    if mesh.ep not in (1, mesh.tp) and not is_one_engine(mesh):
        return f"ep = {mesh.ep}: the engine divides experts among the ranks of tp, which are {mesh.tp}, or of tp and dp"
    n_data = mesh.dp if is_one_engine(mesh) else 1
    n_ranks = mesh.n_stage_ranks * mesh.pp * n_data
    if n_ranks > MOST_RANKS or not n_hosts(mesh, device):
        degrees = {"tp": mesh.tp, "pp": mesh.pp, "dp": n_data, "sp": mesh.sp, "ring": mesh.ring}
        what = ", ".join(f"{name} = {degree}" for name, degree in degrees.items() if degree > 1)
        if n_ranks > MOST_RANKS:
            return f"{what}: an engine has {MOST_RANKS} ranks at most"
        return f"{what}: all ranks of a stage are in one host, {_devices_of(device)}"
    return ""


def _devices_of(device: Accelerator) -> str:
    """How many a host has, as a clause."""
    if device.is_host:
        return (
            "and a plan counts the whole CPU of a host as one device; ranks that share its cores and memory do run, but"
            " are not planned"
        )
    return f"which has {device.n_in_host} device{'s' if device.n_in_host > 1 else ''}"


def n_hosts(mesh: Mesh, device: Accelerator) -> int:
    """On how many machines an engine has its ranks: whole stages of a pipeline, as many on each; 0: it cannot."""
    n_data = mesh.dp if is_one_engine(mesh) else 1
    found = (n for n in range(1, mesh.pp + 1) if mesh.pp % n == 0)
    return next((n for n in found if mesh.n_stage_ranks * mesh.pp // n * n_data <= device.n_in_host), 0)


def is_one_engine(mesh: Mesh) -> bool:
    """Whether what `dp` counts are data-parallel ranks of one engine, which divide the experts among them; else they
    are engines of their own."""
    return mesh.dp > 1 and mesh.pp == 1 and mesh.n_token_ranks == 1 and mesh.ep == mesh.tp * mesh.dp


def format_refusal(formats: Formats, device: Accelerator, arch: ModelArch) -> str:
    """Why this engine cannot have such weights, keys and values of a model on the device; empty: it can."""
    if not device.runs:
        return f"there are no kernels for the {device.name.upper()}"
    weights = formats.weights
    kind = "cpu" if device.is_host else "cuda"
    if weights.name in READ:
        if kind not in READ[weights.name]:
            return (
                f"weights in {weights.name} are decoded when they are read on {'GPUs' if kind == 'cuda' else 'a CPU'}"
            )
    elif weights.is_rounded and not (rounds_to(weights.name, kind) and weights.name in choices("quantization")):
        return f"weights in {weights.name} {_where(weights.name)}"
    try:
        kv_dtype(formats.kv, arch.dtype if weights.is_rounded else weights.name, kind, arch)
    except ConfigError as error:
        return error.message
    if formats.kv == "fp8" and "fp8" not in device.flops_per_s:
        return f"keys and values in fp8 need a GPU that converts to e4m3, as the {device.name.upper()} does not"
    return ""


def _where(name: str) -> str:
    if name not in choices("quantization"):
        return "are not among what the engine can compute with"
    return _only("cuda" if rounds_to(name, "cuda") else "cpu")


def _only(kind: str) -> str:
    return "run on GPUs only" if kind == "cuda" else "run on a CPU only"


def serve_command(
    model: str,
    mesh: Mesh,
    formats: Formats,
    *,
    max_num_seqs: int,
    max_model_len: int,
    quantization: str,
    is_host: bool,
    n_redundant: int | None = None,
    is_coded: bool = False,
    n_nodes: int = 1,
) -> tuple[str, list[str]]:
    """(the command, what it cannot say), of a mesh and formats without a refusal. quantization: the weights' format as
    it was asked for; is_host: on a CPU; n_redundant: copies of experts, which move; None: they stay; is_coded: the
    checkpoint is quantised; n_nodes: see `n_hosts`."""
    words, unsaid = ["quire", "serve", model], []
    if mesh.tp > 1:
        words += ["--tensor-parallel-size", str(mesh.tp)]
    if mesh.pp > 1:
        words += ["--pipeline-parallel-size", str(mesh.pp)]
    if n_nodes > 1:
        words += ["--nnodes", str(n_nodes)]
        unsaid.append(
            f"nnodes = {n_nodes}: start it on each machine, with its own --node-rank, all but node 0 with --headless,"
            " and --master-addr, an address of node 0 (docs/parallel.md)"
        )
    if mesh.ep > 1:
        words.append("--enable-expert-parallel")
    if mesh.ep > 1 and n_redundant is not None:
        words.append("--enable-eplb")
        words += ["--eplb-config", json.dumps({"num_redundant_experts": n_redundant})] if n_redundant else []
    if mesh.n_token_ranks > 1:
        words += ["--prefill-context-parallel-size", str(mesh.n_token_ranks)]
        words += ["--context-parallel-method", "ring" if mesh.ring > 1 else "ulysses"]
    if mesh.sp > 1 and mesh.ring > 1:
        words += ["--ulysses-degree", str(mesh.sp)]
    if is_one_engine(mesh):
        words += ["--data-parallel-size", str(mesh.dp)]
        if mesh.sends_rows and not is_host:
            unsaid.append("steps with prompts, or that send many bytes, are not captured: they take longer than said")
    elif mesh.dp > 1:
        unsaid.append(f"dp = {mesh.dp}: start the command {mesh.dp} times, each with its own devices and port")
    if quantization in FLOATING:
        words += ["--dtype", quantization, *(["--quantization", "none"] if is_coded else [])]
    elif formats.coded is not None:
        pass  # it stays as it is
    elif formats.weights.name in READ:
        unsaid.append(
            f"weights in {formats.weights.name}: the checkpoint of {model} has to have them, as the engine does not"
            " round to that; what a checkpoint has needs no flag"
        )
    elif formats.weights.is_rounded:
        words += ["--quantization", formats.weights.name]
    if formats.kv not in FLOATING:
        words += ["--kv-cache-dtype", formats.kv]
    words += ["--max-num-seqs", str(max_num_seqs), "--max-model-len", str(max_model_len)]
    return shlex.join(words), unsaid


def choices(option: str) -> set[str]:
    """Values that an option of the engine takes."""
    hint = typing.get_type_hints(EngineConfig).get(option)
    return set(typing.get_args(hint))
