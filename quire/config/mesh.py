"""How a model is divided among devices: the degree of each kind of parallelism, and a rank's place. Torch-free.

Owns the arithmetic, and which kinds of division go together. Does not own what a part is (`shares`), how ranks speak
(`compute/dist`), nor which meshes a model can be divided among (`planner/mesh`).
Invariants: the ranks of a mesh are dp * pp * tp * sp * ring; ep divides experts among those of a stage, of all dp.
Ranks that share a layer are neighbours, and so are those of a data-parallel rank; rank 0 has a part of the first layer.
"""

from __future__ import annotations

import msgspec

from quire.config.arch import ModelArch
from quire.config.context import check_alone, n_dividing_heads, n_turns
from quire.config.engine import EngineConfig
from quire.config.eplb import balanced, check_copies
from quire.config.experts import ExpertsSpec
from quire.config.nodes import check_nodes
from quire.core.errors import ConfigError


class Mesh(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """Degrees of each kind of parallelism; 1: not divided so."""

    tp: int = 1
    """Every matrix is divided (Shoeybi et al. 2019, "Megatron-LM")."""
    pp: int = 1
    """Layers are divided into stages (Huang et al. 2019, "GPipe")."""
    dp: int = 1
    """Data-parallel ranks: each has sequences of its own, and whole layers but for experts."""
    ep: int = 1
    """Whole experts are divided (Lepikhin et al. 2021, "GShard"); 1: inner vectors of experts are, by tp."""
    sp: int = 1
    """Tokens of a prompt are divided, and heads of attention (Jacobs et al. 2023, "DeepSpeed Ulysses"); weights are
    not."""
    ring: int = 1
    """Tokens of all sequences are divided, in turn (Liu et al. 2023, "Ring attention"); weights are not."""

    @property
    def n_ranks(self) -> int:
        """All of them."""
        return self.n_ranks_each * self.dp

    @property
    def n_ranks_each(self) -> int:
        """Of a data-parallel rank."""
        return self.n_stage_ranks * self.pp

    @property
    def n_stage_ranks(self) -> int:
        """Of a stage: keys and values of a layer are divided among them, where there are as many heads."""
        return self.tp * self.n_token_ranks

    @property
    def n_sum_ranks(self) -> int:
        """Of the group of a rank that sums go through: `platform.sharing`."""
        return self.tp if self.dp > 1 else self.n_stage_ranks

    @property
    def n_token_ranks(self) -> int:
        """Ranks among which the rows of long steps are divided."""
        return self.sp * self.ring

    @property
    def telling_ranks(self) -> list[int]:
        """Of each data-parallel rank the first of its last stage, which says what was chosen."""
        return [(dp_rank + 1) * self.n_ranks_each - self.n_stage_ranks for dp_rank in range(self.dp)]

    def dp_rank_of(self, rank: int) -> int:
        """The data-parallel rank of a rank."""
        return rank // self.n_ranks_each

    def stage_of(self, rank: int) -> int:
        """The stage of a rank; ranks of one stage are neighbours."""
        return rank % self.n_ranks_each // self.n_stage_ranks

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
        names = ("tp", "pp", "dp", "ep", "sp", "ring")
        found = [f"{name}{getattr(self, name)}" for name in names if getattr(self, name) > 1]
        return " ".join(found) or "one device"


def mesh_of(config: EngineConfig) -> Mesh:
    """As an engine, `settled`, was asked for. Raises ConfigError for what does not go together."""
    tp, dp, pp = config.tensor_parallel_size, config.data_parallel_size, config.pipeline_parallel_size
    if dp > 1 and pp > 1:
        raise ConfigError(
            f"data_parallel_size = {dp} and pipeline_parallel_size = {pp}: data-parallel ranks have no stages"
            " yet: leave one of the two out, or take --tensor-parallel-size beside --data-parallel-size",
            param="data_parallel_size",
        )
    if dp > 1 and config.speculative_config:
        raise ConfigError(
            f"data_parallel_size = {dp} and speculative_config: data-parallel ranks do not draft yet: leave"
            " --speculative-config out, or take --tensor-parallel-size",
            param="speculative_config",
        )
    if pp > 1 and config.speculative_config:
        raise ConfigError(
            f"pipeline_parallel_size = {pp} and speculative_config: a stage would wait for the last one to know which"
            " drafts count: leave --speculative-config out, or take --tensor-parallel-size",
            param="speculative_config",
        )
    check_alone(config)
    check_nodes(config)
    balanced(config)  # or it is refused
    ep = tp * dp if config.enable_expert_parallel else 1
    return Mesh(tp=tp, pp=pp, dp=dp, ep=ep, sp=n_dividing_heads(config), ring=n_turns(config))


def steps_in_flight(pipeline_depth: int, n_stages: int) -> int:
    """One in each stage, and those that hide the host's work."""
    return pipeline_depth + n_stages - 1


def depth_of(config: EngineConfig) -> int:
    """Steps in flight of an engine."""
    return steps_in_flight(config.pipeline_depth, config.pipeline_parallel_size)


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
    block, eplb = (dp_rank, config.data_parallel_size), balanced(config)
    if eplb is None:
        return _with_experts(arch, are_apart=True, block=block)
    n_redundant, n_ranks = eplb.num_redundant_experts, mesh_of(config).ep
    for layer in arch.layers:
        if isinstance(layer.ffn, ExpertsSpec):
            check_copies(layer.ffn.n_experts, n_redundant, n_ranks)
    return _with_experts(arch, are_apart=True, block=block, n_redundant=n_redundant)


def undivided(arch: ModelArch) -> ModelArch:
    """The model before it was `placed`."""
    return _with_experts(arch, are_apart=False, block=(0, 1), n_redundant=None)


def _with_experts(arch: ModelArch, **changes: object) -> ModelArch:
    layers = [
        msgspec.structs.replace(layer, ffn=msgspec.structs.replace(layer.ffn, **changes))
        if isinstance(layer.ffn, ExpertsSpec)
        else layer
        for layer in arch.layers
    ]
    return msgspec.structs.replace(arch, layers=tuple(layers))
