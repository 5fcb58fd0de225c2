"""Whether a model can be divided as an engine was asked to, from config.json alone. Torch-free.

Owns which checks these are, so that a command can make them before it imports torch. Does not own the checks, nor those
that need a device or the weights' scheme (`engine/workers`).
"""

from __future__ import annotations

from quire.config.arch import ModelArch
from quire.config.context import settled
from quire.config.engine import EngineConfig
from quire.config.mesh import mesh_of, placed
from quire.config.shares import share_arch
from quire.config.stages import layer_range


def is_divided(config: EngineConfig) -> bool:
    """Whether more than one rank is asked for, or it is said how they are to divide the model."""
    return (
        config.tensor_parallel_size > 1
        or config.pipeline_parallel_size > 1
        or config.data_parallel_size > 1
        or config.prefill_context_parallel_size > 1
        or config.enable_expert_parallel
        or config.context_parallel_method != "auto"
        or config.ulysses_degree > 0
        or (config.nnodes > 1 and config.node_rank == 0)  # the others need not say how
    )


def check_division(config: EngineConfig, arch: ModelArch) -> None:
    """ConfigError where the model has what its ranks cannot share."""
    config = settled(config, arch)
    shape = mesh_of(config)
    layer_range(arch, 0, shape.pp)
    share_arch(placed(arch, config), 0, shape.tp)
