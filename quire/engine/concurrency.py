"""How many sequences run at once where nobody says and each keeps a recurrent state: as many as memory holds.

Does not own the rule, which plans share (`planner/states`), the equation (`planner/memory`) nor the pool
(`engine/capacity`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import msgspec

from quire.config.arch import ModelArch
from quire.config.engine import EngineConfig
from quire.config.resolve import EngineLimits
from quire.core.units import format_bytes
from quire.engine.capacity import StagePool, equation, tokens_held
from quire.planner.states import fitting_seqs

logger = logging.getLogger("quire.engine")


def with_fitting_seqs(
    config: EngineConfig,
    limits: EngineLimits,
    arch: ModelArch,
    pools: Sequence[StagePool],
    graph_sizes_of: Callable[[EngineLimits], tuple[int, ...]] = lambda asked: (),
) -> EngineLimits:
    """`limits` with as many sequences as `fitting_seqs` chooses, which is logged. What was asked for stays.

    arch: what a rank has of all layers; pools: of the stages; graph_sizes_of: the decode steps captured within
    such limits.
    """
    if not arch.state_specs or config.max_num_seqs:
        return limits

    def n_tokens(n_seqs: int) -> int:
        asked = msgspec.structs.replace(limits, max_num_seqs=n_seqs)
        return min(tokens_held(config, asked, pool, graph_sizes_of(asked)) for pool in pools)

    n_seqs = fitting_seqs(limits.max_num_seqs, limits.max_model_len, n_tokens)
    if n_seqs < limits.max_num_seqs:
        logger.info(
            "max_num_seqs is %d, not %d: each sequence keeps a recurrent state of %s, and more do not fit",
            n_seqs, limits.max_num_seqs, format_bytes(equation(config, limits, arch).state_bytes),
        )  # fmt: skip
    return msgspec.structs.replace(limits, max_num_seqs=n_seqs)
