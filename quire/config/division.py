"""Whether a model can be divided as an engine was asked to, from options and config.json alone. Torch-free.

Owns which checks these are, so that a command can make them before it imports torch, and those of options alone. Does
not own the others, nor those that need a device or the weights' scheme (`engine/workers`).
"""

from __future__ import annotations

from typing import Final

from quire.config.arch import ModelArch
from quire.config.command_line import dashed
from quire.config.context import settled
from quire.config.engine import EngineConfig
from quire.config.mesh import mesh_of, placed
from quire.config.shares import share_arch
from quire.config.stages import layer_range
from quire.core.errors import ConfigError, shown

SIZES: Final = (
    "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "prefill_context_parallel_size",
)  # fmt: skip
SUMMED: Final = "the order in which values of several ranks are summed depends on where a row stands in the batch"
DIVIDED: Final = "whether the tokens of a step are divided among ranks depends on how many there are"


def is_divided(config: EngineConfig) -> bool:
    """Whether more than one rank is asked for, or it is said how they are to divide the model."""
    return (
        config.tensor_parallel_size > 1
        or config.pipeline_parallel_size > 1
        or config.pp_layer_partition != ""
        or config.data_parallel_size > 1
        or config.prefill_context_parallel_size > 1
        or config.enable_expert_parallel
        or config.context_parallel_method != "auto"
        or config.ulysses_degree > 0
        or (config.nnodes > 1 and config.node_rank == 0)  # the others need not say how
    )


def check_division(config: EngineConfig, arch: ModelArch) -> None:
    """ConfigError, with the option, where the model has what its ranks cannot share."""
    config = settled(config, arch)
    shape = mesh_of(config)
    layer_range(arch, 0, shape.pp, config.pp_layer_partition)
    whole = placed(arch, config)
    try:
        share_arch(whole, 0, shape.tp)
    except ConfigError as error:
        if shape.tp == 1:
            raise
        name = "tensor_parallel_size"
        raise ConfigError(f"{name} = {shape.tp}: {error.message}", param=error.param or name) from None


def check_ranks(config: EngineConfig) -> None:
    """ConfigError where several ranks are asked for, and something that only one can do."""
    partition = "pp_layer_partition"
    name = next((name for name in SIZES if getattr(config, name) > 1), partition if config.pp_layer_partition else "")
    if config.is_simulated and name:
        raise ConfigError(
            f"{name} = {shown(getattr(config, name))} and device = 'null', which has no model that could be divided:"
            f" leave {dashed(name)} out, or add --device cpu or cuda",
            param=name,
        )
    reason = not_deterministic(config)
    if config.deterministic and reason:
        instead = "take one rank, or leave --deterministic out"
        if config.data_parallel_size == 1:
            instead = "take one rank or --data-parallel-size, or leave --deterministic out"
        raise ConfigError(f"deterministic = True cannot be promised {reason}; {instead}", param="deterministic")


def not_deterministic(config: EngineConfig) -> str:
    """Why ranks make the bits of a request depend on its company, with the option that asks for them; empty: they do
    not."""
    tp, pcp, dp = config.tensor_parallel_size, config.prefill_context_parallel_size, config.data_parallel_size
    if pcp > 1:
        return f"with prefill_context_parallel_size = {pcp}: {DIVIDED}"
    if tp > 1:
        return f"with tensor_parallel_size = {tp}: {SUMMED}"
    if dp > 1 and config.enable_expert_parallel:
        return f"with data_parallel_size = {dp} and enable_expert_parallel = True: {SUMMED}"
    return ""
