"""Which rank has which part of a model: numbers of ranks along each axis, and a rank's place. Torch-free.

Owns the arithmetic, and which kinds of division go together. Does not own what a part is (`shares`) nor how ranks speak
(`compute/dist`). Invariant: ranks that share a layer are neighbours, and so are those of a data-parallel rank; rank 0
has a part of the first layer.
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
    data: int = 1
    """Data-parallel ranks, of so many stages each: each has sequences of its own, and whole layers but for experts."""
    exchanges: bool = False
    """Experts are divided among the ranks of all data-parallel ranks, which send rows to one another."""

    @property
    def n_ranks(self) -> int:
        """All of them."""
        return self.n_ranks_each * self.data

    @property
    def n_ranks_each(self) -> int:
        """Of a data-parallel rank."""
        return self.tensor * self.pipeline

    @property
    def telling_ranks(self) -> list[int]:
        """Of each data-parallel rank the first of its last stage, which says what was chosen."""
        return [(dp_rank + 1) * self.n_ranks_each - self.tensor for dp_rank in range(self.data)]

    def dp_rank_of(self, rank: int) -> int:
        """The data-parallel rank of a rank."""
        return rank // self.n_ranks_each

    def stage_of(self, rank: int) -> int:
        """The stage of a rank; ranks of one stage are neighbours."""
        return rank % self.n_ranks_each // self.tensor

    def place_in_stage(self, rank: int) -> int:
        """A rank among those of its stage."""
        return rank % self.tensor


def mesh_shape(config: EngineConfig) -> MeshShape:
    """As it was asked for. Raises ConfigError for what does not go together."""
    n_data, n_stages = config.data_parallel_size, config.pipeline_parallel_size
    if n_data > 1 and n_stages > 1:
        raise ConfigError(
            f"data_parallel_size = {n_data} and pipeline_parallel_size = {n_stages}: data-parallel ranks have no stages"
            " yet: leave one of the two out, or take --tensor-parallel-size beside --data-parallel-size",
            param="data_parallel_size",
        )
    if n_data > 1 and config.speculative_config:
        raise ConfigError(
            f"data_parallel_size = {n_data} and speculative_config: data-parallel ranks do not draft yet: leave"
            " --speculative-config out, or take --tensor-parallel-size",
            param="speculative_config",
        )
    exchanges = n_data > 1 and config.enable_expert_parallel
    return MeshShape(tensor=config.tensor_parallel_size, pipeline=n_stages, data=n_data, exchanges=exchanges)


def depth_of(config: EngineConfig) -> int:
    """Steps in flight: one in each stage, and those that hide the host's work."""
    return config.pipeline_depth + config.pipeline_parallel_size - 1


def placed(arch: ModelArch, config: EngineConfig, dp_rank: int = 0) -> ModelArch:
    """The model as the ranks of a data-parallel rank are to divide it. Raises ConfigError where that was asked for what
    it has not."""
    if not config.enable_expert_parallel:
        return arch
    if not any(isinstance(layer.ffn, ExpertsSpec) for layer in arch.layers):
        raise ConfigError(
            f"enable_expert_parallel = True but {arch.family} has no experts: leave --enable-expert-parallel out",
            param="enable_expert_parallel",
        )
    return _with_experts(arch, are_apart=True, block=(dp_rank, config.data_parallel_size))


def undivided(arch: ModelArch) -> ModelArch:
    """The model before it was `placed`."""
    return _with_experts(arch, are_apart=False, block=(0, 1))


def _with_experts(arch: ModelArch, **changes: object) -> ModelArch:
    layers = [
        msgspec.structs.replace(layer, ffn=msgspec.structs.replace(layer.ffn, **changes))
        if isinstance(layer.ffn, ExpertsSpec)
        else layer
        for layer in arch.layers
    ]
    return msgspec.structs.replace(arch, layers=tuple(layers))
