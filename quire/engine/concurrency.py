"""How many sequences run at once where nobody says and each keeps a recurrent state: as many as memory holds.

Owns that choice. Does not own the equation (`planner/memory`) nor the pool (`engine/capacity`).
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable, Sequence

import msgspec

from quire.config.arch import ModelArch
from quire.config.engine import EngineConfig
from quire.config.resolve import EngineLimits
from quire.core.units import format_bytes
from quire.engine.capacity import StagePool, equation, tokens_held

logger = logging.getLogger("quire.engine")


def with_fitting_seqs(
    config: EngineConfig,
    limits: EngineLimits,
    arch: ModelArch,
    pools: Sequence[StagePool],
    graph_sizes_of: Callable[[EngineLimits], tuple[int, ...]] = lambda asked: (),
) -> EngineLimits:
    """`limits` with the most sequences beside which one of `max_model_len` has room, which is logged; where no number
    leaves that much, with the most that leave half of what one alone would have. What was asked for stays.

    arch: what a rank has of all layers; pools: of the stages; graph_sizes_of: the decode steps captured within
    such limits.
    """
    if not arch.state_specs or config.max_num_seqs:
        return limits

    def n_tokens(n_seqs: int) -> int:
        asked = msgspec.structs.replace(limits, max_num_seqs=n_seqs)
        return min(tokens_held(config, asked, arch, pool, graph_sizes_of(asked)) for pool in pools)

    alone, n_seqs = n_tokens(1), 1
    if alone:
        wanted = limits.max_model_len if alone >= limits.max_model_len else alone // 2
        numbers = range(2, limits.max_num_seqs + 1)
        n_seqs = 1 + bisect.bisect_left(numbers, True, key=lambda n: n_tokens(n) < wanted)
    if n_seqs < limits.max_num_seqs:
        logger.info(
            "max_num_seqs is %d, not %d: each sequence keeps a recurrent state of %s, and more do not fit",
            n_seqs, limits.max_num_seqs, format_bytes(equation(config, limits, arch).state_bytes),
        )  # fmt: skip
    return msgspec.structs.replace(limits, max_num_seqs=n_seqs)
