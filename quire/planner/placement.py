"""Whether a model fits on the devices of a mesh, and how many sequences of what length beside it.

Owns the choice of the fullest rank and of limits. Does not own the equation (`memory`): it is the one by which an
engine sizes its pool at start.
"""

from __future__ import annotations

from typing import Final

import msgspec

from quire.config.arch import ModelArch
from quire.config.kv import kv_layout
from quire.config.shares import share_arch
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
        shared = self.equation.seq_pages(n_shared) if n_shared >= PAGE_SIZE else 0
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
        return max(0, self.n_pages) * PAGE_SIZE // max(1, len(self.equation.layout.groups))


def place(arch: ModelArch, memory_bytes: float, mesh: Mesh, formats: Formats, limits: Limits) -> Placement:
    """ConfigError where the mesh cannot divide the model, or its layers store different keys."""
    stage = _fullest_stage(arch, mesh)
    own = share_arch(stage, 0, mesh.tp)
    parts = rank_parts(arch, mesh, formats)
    ends_bytes = parts.embedding_bytes + (
        0 if arch.tie_embeddings and mesh.pp == 1 and not formats.weights.is_rounded else parts.head.n_bytes
    )
    layer_bytes = parts.weights_bytes - parts.embedding_bytes
    if not arch.tie_embeddings or formats.weights.is_rounded:
        layer_bytes -= parts.head.n_bytes
    if mesh.pp > 1:  # the first stage has the embedding, the last the head
        ends_bytes = max(parts.embedding_bytes, parts.head.n_bytes)
        layer_bytes *= -(-arch.n_layers // mesh.pp) / arch.n_layers
    n_seqs = limits.max_num_seqs
    share = max((kv_share(kv, mesh.sp) for kv in own.kv_specs.values()), default=1.0)
    equation = MemoryEquation(
        arch=own, page_size=PAGE_SIZE, max_num_seqs=n_seqs,
        max_num_batched_tokens=max(n_seqs, -(-limits.max_num_batched_tokens // mesh.sp)),
        max_model_len=limits.max_model_len or arch.max_position, weights_bytes=round(layer_bytes + ends_bytes),
        itemsize=formats.itemsize, kv_itemsize=formats.kv_itemsize(arch.head_dim) * share,
        graph_sizes=tuple(decode_sizes(n_seqs)) if limits.captures else (),
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


def _fullest_stage(arch: ModelArch, mesh: Mesh) -> ModelArch:
    """The layers of the last stage: models begin with their smaller ones."""
    if mesh.pp == 1:
        return arch
    if mesh.pp > arch.n_layers:
        raise ConfigError(f"{mesh.pp} stages of {arch.n_layers} layers: take at most as many stages as layers")
    n_layers = -(-arch.n_layers // mesh.pp)
    return msgspec.structs.replace(arch, layers=arch.layers[arch.n_layers - n_layers :])
