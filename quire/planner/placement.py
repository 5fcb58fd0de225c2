"""Whether a model fits on the devices of a mesh, and how many sequences of what length beside it.

Owns the choice of the fullest rank and of limits. Does not own the equation (`memory`): it is the one by which an
engine sizes its pool at start.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Final

import msgspec

from quire.config.arch import ModelArch
from quire.config.attention import AttentionSpec
from quire.config.context import with_own_heads
from quire.config.engine import EngineConfig
from quire.config.kv import KVLayout, tokens_in_flight
from quire.config.mesh import Mesh, steps_in_flight
from quire.config.resolve import DEFAULT_BATCHED_TOKENS, DEFAULT_SEQS
from quire.config.shares import share_arch
from quire.config.stages import LayerRange, layout_over, stage_arch, stage_layers, stage_layout
from quire.core.errors import ConfigError
from quire.planner.captured import decode_sizes
from quire.planner.expert_loads import ExpertLoads
from quire.planner.formats import Formats
from quire.planner.main_memory import main_pool_bytes
from quire.planner.memory import MemoryEquation, n_passing
from quire.planner.parts import EVEN_LOADS, kv_share, rank_parts
from quire.planner.states import n_kept_states

DEFAULTS: Final = EngineConfig()
"""Of an engine: what a plan says nothing of."""
PAGE_SIZE: Final = DEFAULTS.block_size


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Of the engine, in its flags' words."""

    max_num_seqs: int = DEFAULT_SEQS["cuda"]
    are_seqs_given: bool = False
    """Somebody asked for max_num_seqs; else memory chooses among fewer where each keeps a recurrent state."""
    max_num_batched_tokens: int = DEFAULT_BATCHED_TOKENS["cuda"]
    max_model_len: int = 0
    """0: what the model states."""
    gpu_memory_utilization: float = DEFAULTS.gpu_memory_utilization
    captures: bool = True
    """Whether decode steps are captured."""
    in_main_memory: bool = False
    """On a CPU, whose pool is sized by what is free."""


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """Of the fullest rank."""

    mesh: Mesh
    budget_bytes: float
    terms: dict[str, int]
    """Name → bytes, the pages left out."""
    page_bytes: int
    n_pages: int
    """That fit, the dummy page left out; below 1: the model does not fit."""
    lacking_bytes: int
    equation: MemoryEquation
    """Of this rank."""

    @property
    def fits(self) -> bool:
        """At least one page of each group."""
        return self.lacking_bytes <= 0

    @property
    def weights_bytes(self) -> int:
        """Of this rank."""
        return self.equation.weights_bytes

    def seqs_within(self, n_tokens: int, n_shared: int = 0) -> int:
        """Sequences of so many tokens at their end, at once; n_shared: tokens at the front that all have together."""
        each = self.equation.seq_pages(n_tokens)
        shared = self.equation.seq_pages(n_shared) if n_shared >= self.equation.page_size else 0
        alone = max(1, each - shared)
        most = max(0, self.n_pages - shared) // alone
        return max(0, min(most, self.equation.max_num_seqs))

    @property
    def longest(self) -> int:
        """Tokens of a sequence that is alone, whatever the model states."""
        return self.equation.tokens_within(max(0, self.n_pages))

    @property
    def pool_tokens(self) -> int:
        """Tokens whose keys and values fit, over all sequences, where nothing is behind a window."""
        return max(0, self.n_pages) * self.equation.page_size // max(1, len(self.equation.layout.groups))


def place(
    arch: ModelArch,
    memory_bytes: float,
    mesh: Mesh,
    formats: Formats,
    limits: Limits,
    loads: ExpertLoads = EVEN_LOADS,
    *,
    on_hopper: bool = False,
) -> Placement:
    """loads: of experts, whose copies take memory; on_hopper: as `EngineLimits.on_hopper`. ConfigError where the mesh
    cannot divide the model, or its layers store different keys."""
    layout = layout_over(share_arch(arch, 0, mesh.tp), limits.max_model_len or arch.max_position, mesh.pp)
    found = [
        _placed(stage, layout, memory_bytes, mesh, formats, limits, loads, on_hopper=on_hopper)
        for stage in _stages(arch, mesh.pp)
    ]
    return min(found, key=lambda one: (one.n_pages, -one.lacking_bytes))


class _Stage(msgspec.Struct, frozen=True):
    """Layers of a pipeline that one rank of `tp` has a part of; without pipeline, all."""

    arch: ModelArch
    layers: LayerRange
    has_head: bool
    """As a matrix of its own."""


@functools.lru_cache(maxsize=256)
def _stages(arch: ModelArch, n_stages: int) -> tuple[_Stage, ...]:
    """Those that differ."""
    ranges = stage_layers(arch.n_layers, n_stages)
    if not all(ranges):
        raise ConfigError(f"{n_stages} stages of {arch.n_layers} layers: take at most as many stages as layers")
    found: dict[object, _Stage] = {}
    for one in ranges:
        layers = LayerRange(one.start, one.stop, arch.n_layers)
        has_head = layers.is_last and not (layers.is_first and arch.tie_embeddings)
        part = stage_arch(arch, layers)
        found.setdefault((part.layers, layers.is_first, layers.is_last), _Stage(part, layers, has_head))
    return tuple(found.values())


def _placed(
    stage: _Stage,
    layout: KVLayout,
    memory_bytes: float,
    mesh: Mesh,
    formats: Formats,
    limits: Limits,
    loads: ExpertLoads,
    *,
    on_hopper: bool,
) -> Placement:
    """layout: of the whole model."""
    arch, own = stage.arch, share_arch(stage.arch, 0, mesh.tp)
    parts = rank_parts(arch, msgspec.structs.replace(mesh, pp=1), formats, loads)
    weights_bytes = parts.layers_bytes + (parts.embedding_bytes if stage.layers.is_first else 0)
    weights_bytes += parts.head.n_bytes if stage.has_head or (formats.head.is_rounded and mesh.pp == 1) else 0
    depth = steps_in_flight(DEFAULTS.pipeline_depth, mesh.pp)
    n_seqs = limits.max_num_seqs
    share = max((kv_share(kv, mesh.sp) for kv in own.kv_specs.values()), default=1.0)
    equation = MemoryEquation(
        arch=_attending(own, mesh.sp), page_size=PAGE_SIZE * mesh.ring, page_ranks=mesh.ring,
        row_ranks=mesh.n_token_ranks, max_num_seqs=n_seqs,
        max_num_batched_tokens=max(n_seqs, limits.max_num_batched_tokens),
        max_model_len=limits.max_model_len or arch.max_position, weights_bytes=round(weights_bytes),
        itemsize=formats.itemsize, kv_itemsize=formats.kv_itemsize(arch.head_dim) * share,
        graph_sizes=tuple(decode_sizes(n_seqs)) if limits.captures and mesh.ring == 1 else (),
        kv=stage_layout(layout, stage.layers), in_flight=tokens_in_flight(depth),
        prompt_in_flight=depth * limits.max_num_batched_tokens, n_passing=n_passing(DEFAULTS.pipeline_depth, mesh.pp),
        exchanged_rows=mesh.ep // mesh.tp * limits.max_num_batched_tokens if mesh.sends_rows else 0,
        widens_keys=formats.kv == "fp8" and on_hopper, on_gpu=True, sum_ranks=mesh.n_sum_ranks if on_hopper else 0,
    )  # fmt: skip
    free_bytes = int(memory_bytes) - equation.weights_bytes
    n_kept = n_kept_states(free_bytes, equation.state_bytes, n_seqs)
    equation = dataclasses.replace(equation, n_snapshots=n_kept)
    lacking = equation.total_bytes(equation.min_pages) - int(memory_bytes * limits.gpu_memory_utilization)
    budget = _budget(equation, memory_bytes, limits)
    names = ("weights", "workspace", "logits", "tables", "graphs", "states", "peers")
    return Placement(
        mesh=mesh, budget_bytes=budget, terms={name: getattr(equation, f"{name}_bytes") for name in names},
        page_bytes=equation.page_bytes, n_pages=(budget - equation.fixed_bytes) // equation.page_bytes - 1,
        lacking_bytes=lacking, equation=equation,
    )  # fmt: skip


def _budget(equation: MemoryEquation, memory_bytes: float, limits: Limits) -> int:
    """Bytes for the whole engine."""
    if not limits.in_main_memory:
        return int(memory_bytes * limits.gpu_memory_utilization)
    free_bytes = max(0, int(memory_bytes) - equation.fixed_bytes)
    return equation.fixed_bytes + main_pool_bytes(equation, free_bytes, is_length_asked=limits.max_model_len > 0)


def _attending(own: ModelArch, n_ranks: int) -> ModelArch:
    """With a part of the heads, where they are not lines."""
    divides = n_ranks > 1 and all(isinstance(layer.mixer, AttentionSpec) for layer in own.layers)
    return with_own_heads(own, 0, n_ranks) if divides else own
