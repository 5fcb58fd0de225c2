"""How a model is divided among devices: the degree of each kind of parallelism, and a rank's place. Torch-free.

Owns the arithmetic. Does not own what a part is (`shares`), how ranks speak (`compute/dist`), nor which meshes a model
can be divided among (`planner/mesh`).
Invariants: the ranks of a mesh are tp * pp * sp * dp; ep divides experts among the tp * sp * dp ranks of a stage. Ranks
that share a layer are neighbours; rank 0 has a part of the first layer.
"""

from __future__ import annotations

import msgspec

from quire.config.arch import ModelArch
from quire.config.engine import EngineConfig
from quire.config.experts import ExpertsSpec
from quire.core.errors import ConfigError


class Mesh(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """Degrees of each kind of parallelism; 1: not divided so."""

    tp: int = 1
    """Every matrix is divided (Shoeybi et al. 2019, "Megatron-LM")."""
    pp: int = 1
    """Layers are divided into stages (Huang et al. 2019, "GPipe")."""
    dp: int = 1
    """Replicas, each with its own requests."""
    ep: int = 1
    """Whole experts are divided (Lepikhin et al. 2021, "GShard"); 1: inner vectors of experts are, by tp."""
    sp: int = 1
    """Tokens of a prompt are divided (Jacobs et al. 2023, "DeepSpeed Ulysses"); weights are not."""

    @property
    def n_devices(self) -> int:
        """Ranks in all."""
        return self.n_ranks * self.dp

    @property
    def n_ranks(self) -> int:
        """Of one replica, which is one engine."""
        return self.n_stage_ranks * self.pp

    @property
    def n_stage_ranks(self) -> int:
        """Of a stage: keys and values of a layer are divided among them, where there are as many heads."""
        return self.tp * self.sp

    @property
    def telling_rank(self) -> int:
        """The first of the last stage, which says what was chosen."""
        return self.n_ranks - self.n_stage_ranks

    def stage_of(self, rank: int) -> int:
        """The stage of a rank; ranks of one stage are neighbours."""
        return rank // self.n_stage_ranks

    def place_in_stage(self, rank: int) -> int:
        """A rank among those of its stage."""
        return rank % self.n_stage_ranks

    @property
    def sends_rows(self) -> bool:
        """Whether rows travel to their experts. Where experts are divided among the ranks of `tp`, these have the same
        rows already, and their sum is an all-reduce."""
        return self.ep > 1 and self.ep != self.tp

    @property
    def words(self) -> str:
        """`tp4 pp2`; 'one device' for one."""
        found = [f"{name}{getattr(self, name)}" for name in ("tp", "pp", "dp", "ep", "sp") if getattr(self, name) > 1]
        return " ".join(found) or "one device"


def mesh_of(config: EngineConfig) -> Mesh:
    """As an engine was asked for."""
    tp = config.tensor_parallel_size
    return Mesh(tp=tp, pp=config.pipeline_parallel_size, ep=tp if config.enable_expert_parallel else 1)


def steps_in_flight(pipeline_depth: int, n_stages: int) -> int:
    """One in each stage, and those that hide the host's work."""
    return pipeline_depth + n_stages - 1


def depth_of(config: EngineConfig) -> int:
    """Steps in flight of an engine."""
    return steps_in_flight(config.pipeline_depth, config.pipeline_parallel_size)


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
