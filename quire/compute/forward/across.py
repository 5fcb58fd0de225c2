"""Which forwards a rank has that shares the tokens of steps with others, and how it attends with them.

Owns the choice by options. Does not own what ranks exchange (`runner/ulysses`, `runner/ring_context`).
"""

from __future__ import annotations

import dataclasses
from typing import cast

from quire.compute.dist.comm import Comm, MeetingComm
from quire.compute.forward.divided import DividedForward
from quire.compute.forward.ring import RingForward
from quire.compute.models.decoder import Decoder
from quire.compute.platform import Forwards, Platform
from quire.compute.runner.pool import Across, KVPool
from quire.compute.runner.ring import Ring
from quire.compute.runner.tables import SlotTables
from quire.compute.runner.tail import Tail
from quire.compute.runner.ulysses import Ulysses
from quire.config.context import deals_tokens
from quire.config.engine import EngineConfig
from quire.config.resolve import EngineLimits
from quire.core.ticker import ticking


def across_of(config: EngineConfig, model: Decoder, comm: Comm) -> Across | None:
    """comm: of all ranks. None: each rank attends by itself."""
    if config.prefill_context_parallel_size == 1:
        return None
    meeting = cast("MeetingComm", comm)
    return Ring(model, meeting) if deals_tokens(config) else Ulysses(model, meeting)


def forwards_of(
    platform: Platform, model: Decoder, pool: KVPool, tables: SlotTables, tail: Tail, limits: EngineLimits
) -> Forwards:
    """The platform's, of a pool that may be one of several. Steps of a ring are not captured."""
    device = platform.device
    if isinstance(pool.across, Ring):
        with ticking("building kernels"):
            model.build_kernels(limits.max_num_batched_tokens)
        return Forwards([RingForward(device, model, pool, tables, pool.across)])
    forwards = platform.forwards(model, pool, tables, tail, limits)
    if isinstance(pool.across, Ulysses):
        divided = DividedForward(device, model, pool, tables, pool.across)
        forwards = dataclasses.replace(forwards, in_turn=[divided, *forwards.in_turn])
    return forwards
