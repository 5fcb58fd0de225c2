"""Which rank has which part of a model: numbers of ranks along each axis, and a rank's place. Torch-free.

Owns the arithmetic. Does not own what a part is (`shares`) nor how ranks speak (`compute/dist`).
Invariant: ranks that share a layer are neighbours; rank 0 has a part of the first layer.
"""

from __future__ import annotations

import msgspec

from quire.config.arch import ModelArch
from quire.config.engine import EngineConfig
from quire.config.experts import ExpertsSpec
from quire.core.errors import ConfigError


class MeshShape(msgspec.Struct, frozen=True):
    """Ranks of one engine."""

    tensor: int = 1
    """That share every layer."""
    pipeline: int = 1
    """Stages of neighbouring layers, of so many ranks each."""
    context: int = 1
    """That share the tokens of a step, each with all weights; then there is neither of the others."""

    @property
    def n_ranks(self) -> int:
        """All of them."""
        return self.tensor * self.pipeline * self.context

    @property
    def telling_rank(self) -> int:
        """The first of the last stage, which says what was chosen."""
        return self.n_ranks - self.n_in_stage

    @property
    def n_in_stage(self) -> int:
        """Ranks that have the same layers."""
        return self.tensor * self.context

    def stage_of(self, rank: int) -> int:
        """The stage of a rank; ranks of one stage are neighbours."""
        return rank // self.n_in_stage

    def place_in_stage(self, rank: int) -> int:
        """A rank among those of its stage."""
        return rank % self.n_in_stage


def mesh_shape(config: EngineConfig) -> MeshShape:
    """As it was asked for."""
    return MeshShape(
        tensor=config.tensor_parallel_size, pipeline=config.pipeline_parallel_size,
        context=config.prefill_context_parallel_size,
    )  # fmt: skip


def depth_of(config: EngineConfig) -> int:
    """Steps in flight: one in each stage, and those that hide the host's work."""
    return config.pipeline_depth + config.pipeline_parallel_size - 1


def placed(arch: ModelArch, config: EngineConfig) -> ModelArch:
    """The model as its ranks are to divide it. Raises ConfigError where that was asked for what it has not."""
    if not config.enable_expert_parallel:
        return arch
    if not any(isinstance(layer.ffn, ExpertsSpec) for layer in arch.layers):
        raise ConfigError(
            f"enable_expert_parallel = True but {arch.family} has no experts: leave --enable-expert-parallel out",
            param="enable_expert_parallel",
        )
    layers = [
        msgspec.structs.replace(layer, ffn=msgspec.structs.replace(layer.ffn, are_apart=True))
        if isinstance(layer.ffn, ExpertsSpec)
        else layer
        for layer in arch.layers
    ]
    return msgspec.structs.replace(arch, layers=tuple(layers))
