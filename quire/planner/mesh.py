"""Which meshes there are, and whether a model can be divided among one; what one rank has of a layer.

Does not own what a mesh is (`config/mesh`), the arithmetic of cuts (`config/shares`) nor traffic (`communication`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from quire.config.arch import ModelArch
from quire.config.layers import LayerSpec
from quire.config.mesh import Mesh
from quire.config.shares import share_layer
from quire.core.errors import ConfigError
from quire.planner.context import LEAST_ROWS


def division_refusal(mesh: Mesh, arch: ModelArch, n_copies: int = 0) -> str:
    """Why the model cannot be divided so; empty: it can. n_copies: of experts in each layer."""
    if mesh.pp > arch.n_layers:
        return f"{mesh.pp} stages of {arch.n_layers} layers"
    if mesh.ep > 1:
        n_experts = [n for n in map(n_experts_of, dict.fromkeys(arch.layers)) if n]
        if not n_experts:
            return f"ep = {mesh.ep}: the model has no experts"
        if any((n + n_copies) % mesh.ep for n in n_experts):
            return f"{n_experts[0]} experts{f' and {n_copies} copies' if n_copies else ''} among {mesh.ep} ranks"
        if mesh.n_stage_ranks * mesh.dp % mesh.ep:
            return f"ep = {mesh.ep} does not divide the {mesh.n_stage_ranks * mesh.dp} ranks of a stage"
    if mesh.n_token_ranks > 1 and any(spec.mixer.state_spec is not None for spec in arch.layers):
        return f"sp = {mesh.sp}, ring = {mesh.ring}: the tokens of recurrent layers follow each other"
    try:
        for spec in dict.fromkeys(arch.layers):
            rank_layer(spec, mesh.tp)
            if mesh.sp > 1 and arch.n_heads % (mesh.tp * mesh.sp):
                return f"{arch.n_heads} heads among {mesh.tp * mesh.sp} ranks"
    except ConfigError as error:
        return error.message
    return ""


@functools.lru_cache(maxsize=1024)
def rank_layer(spec: LayerSpec, tp: int) -> LayerSpec:
    """What the first rank of `tp` computes of a layer. ConfigError where it cannot be divided."""
    return spec if tp == 1 else share_layer(spec, 0, tp)


def n_experts_of(spec: LayerSpec) -> int:
    """Experts of a layer; 0: it has none."""
    return int(getattr(spec.ffn, "n_experts", 0))


def own_rows(mesh: Mesh, n_rows: float) -> float:
    """Of a step, those of one rank among which it is divided."""
    return n_rows if n_rows < LEAST_ROWS["cuda"] else n_rows / mesh.n_token_ranks


def divisors(n: int) -> list[int]:
    """Rising."""
    return [d for d in range(1, n + 1) if n % d == 0]


def meshes(n_devices: int, *, experts: bool, sequences: bool) -> Iterator[Mesh]:
    """All that use exactly so many devices; experts, sequences: with those kinds of parallelism."""
    for tp in divisors(n_devices):
        for pp in divisors(n_devices // tp):
            for sp in divisors(n_devices // (tp * pp)) if sequences else [1]:
                dp = n_devices // (tp * pp * sp)
                for ep in divisors(tp * sp * dp) if experts else [1]:
                    yield Mesh(tp=tp, pp=pp, dp=dp, ep=ep, sp=sp)
