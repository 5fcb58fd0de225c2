"""Whether a model fits on the devices of a mesh, and how many sequences of what length beside it.

Owns the choice of the fullest rank and of limits. Does not own the equation (`memory`): it is the one by which an
engine sizes its pool at start.
"""

from __future__ import annotations

import functools
from typing import Final

import msgspec

from quire.config.arch import ModelArch
from quire.config.attention import AttentionSpec
from quire.config.context import with_own_heads
from quire.config.kv import kv_layout
from quire.config.shares import share_arch
from quire.config.stages import stage_layers
from quire.core.errors import ConfigError
from quire.planner.captured import decode_sizes
from quire.planner.formats import Formats
from quire.planner.memory import MemoryEquation
from quire.planner.mesh import Mesh
from quire.planner.parts import kv_share, rank_parts

UTILIZATION: Final = 0.9
"""Of a device's memory: the engine's default."""
DEVICE_SEQS, DEVICE_TOKENS, PAGE_SIZE = 1024, 8192, 16
"""Of an engine on a GPU, as by default."""
MOST_PAGES: Final = 1 << 40
IN_FLIGHT: Final = 2


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Of the engine, in its flags' words."""

    max_num_seqs: int = DEVICE_SEQS
    max_num_batched_tokens: int = DEVICE_TOKENS
    max_model_len: int = 0
    """0: what the model states."""
    gpu_memory_utilization: float = UTILIZATION
    captures: bool = True
    """Whether decode steps are captured."""


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


def place(arch: ModelArch, memory_bytes: float, mesh: Mesh, formats: Formats, limits: Limits) -> Placement:
    """ConfigError where the mesh cannot divide the model, or its layers store different keys."""
    found = [_placed(stage, memory_bytes, mesh, formats, limits) for stage in _stages(arch, mesh.pp)]
    return min(found, key=lambda one: (one.n_pages, -one.lacking_bytes))


class _Stage(msgspec.Struct, frozen=True):
    """Layers of a pipeline that one rank of `tp` has a part of; without pipeline, all."""

    arch: ModelArch
    has_embedding: bool
    has_head: bool
    """As a matrix of its own."""


@functools.lru_cache(maxsize=256)
def _stages(arch: ModelArch, n_stages: int) -> tuple[_Stage, ...]:
    """Those that differ."""
    if n_stages == 1:
        return (_Stage(arch, True, not arch.tie_embeddings),)
    ranges = stage_layers(arch.n_layers, n_stages)
    if not all(ranges):
        raise ConfigError(f"{n_stages} stages of {arch.n_layers} layers: take at most as many stages as layers")
    found: dict[object, _Stage] = {}
    for stage, layers in enumerate(ranges):
        own = arch.layers[layers.start : layers.stop]
        is_first, is_last = stage == 0, stage == n_stages - 1
        n_positions = arch.n_positions if is_first else 0
        part = msgspec.structs.replace(arch, layers=own, n_positions=n_positions)
        found.setdefault((own, is_first, is_last), _Stage(part, is_first, is_last))
    return tuple(found.values())


def _placed(stage: _Stage, memory_bytes: float, mesh: Mesh, formats: Formats, limits: Limits) -> Placement:
    arch, own = stage.arch, share_arch(stage.arch, 0, mesh.tp)
    parts = rank_parts(arch, msgspec.structs.replace(mesh, pp=1), formats)
    weights_bytes = parts.layers_bytes + (parts.embedding_bytes if stage.has_embedding else 0)
    weights_bytes += parts.head.n_bytes if stage.has_head or (formats.weights.is_rounded and mesh.pp == 1) else 0
    n_seqs = limits.max_num_seqs
    share = max((kv_share(kv, mesh.sp) for kv in own.kv_specs.values()), default=1.0)
    equation = MemoryEquation(
        arch=_attending(own, mesh.sp), page_size=PAGE_SIZE * mesh.ring, page_ranks=mesh.ring,
        row_ranks=mesh.n_token_ranks, max_num_seqs=n_seqs,
        max_num_batched_tokens=max(n_seqs, limits.max_num_batched_tokens),
        max_model_len=limits.max_model_len or arch.max_position, weights_bytes=round(weights_bytes),
        itemsize=formats.itemsize, kv_itemsize=formats.kv_itemsize(arch.head_dim) * share,
        graph_sizes=tuple(decode_sizes(n_seqs)) if limits.captures and mesh.ring == 1 else (),
        kv=kv_layout(own, limits.max_model_len or arch.max_position), in_flight=IN_FLIGHT,
        prompt_in_flight=IN_FLIGHT * limits.max_num_batched_tokens,
    )  # fmt: skip
    budget = int(memory_bytes * limits.gpu_memory_utilization)
    lacking = equation.total_bytes(equation.min_pages) - budget
    names = ("weights", "workspace", "logits", "tables", "graphs", "states")
    return Placement(
        mesh=mesh, budget_bytes=budget, terms={name: getattr(equation, f"{name}_bytes") for name in names},
        page_bytes=equation.page_bytes, n_pages=(budget - equation.fixed_bytes) // equation.page_bytes - 1,
        lacking_bytes=lacking, equation=equation,
    )  # fmt: skip


def _attending(own: ModelArch, n_ranks: int) -> ModelArch:
    """With a part of the heads, where they are not lines."""
    divides = n_ranks > 1 and all(isinstance(layer.mixer, AttentionSpec) for layer in own.layers)
    return with_own_heads(own, 0, n_ranks) if divides else own
