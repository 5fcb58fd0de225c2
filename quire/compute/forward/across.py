"""Which forwards a rank has that shares the tokens of steps with others, and how it attends with them.

Owns the choice by options. Does not own what ranks exchange (`runner/ulysses`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, cast

from quire.compute.device.device import Device
from quire.compute.dist.comm import Comm, MeetingComm
from quire.compute.forward.divided import DividedForward
from quire.compute.forward.strategy import Forward
from quire.compute.models.decoder import Decoder
from quire.compute.runner.pool import Across, KVPool
from quire.compute.runner.tables import SlotTables
from quire.compute.runner.ulysses import Ulysses
from quire.config.engine import EngineConfig

LEAST_ROWS: Final = {"cpu": 16, "cuda": 512}
"""Rows of a step from which on they are divided. On GPUs a round estimate, not measured: up to about 300 rows an H100
reads weights for as long as it multiplies, whoever has the rows, and two messages a layer take as long as 100 more."""


def across_of(config: EngineConfig, model: Decoder, comm: Comm) -> Across | None:
    """comm: of all ranks. None: each rank attends by itself."""
    if config.prefill_context_parallel_size == 1:
        return None
    return Ulysses(model, cast("MeetingComm", comm))


def with_divided(
    forwards: Sequence[Forward], device: Device, model: Decoder, pool: KVPool, tables: SlotTables
) -> list[Forward]:
    """These, and before them what divides long steps, where the pool is one of several ranks."""
    if not isinstance(pool.across, Ulysses):
        return list(forwards)
    least_rows = LEAST_ROWS["cpu" if device.is_host else "cuda"]
    return [DividedForward(device, model, pool, tables, pool.across, least_rows), *forwards]
