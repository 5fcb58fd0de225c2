"""Which forwards a rank has that shares the tokens of steps with others, and how it attends with them.

Owns the choice by options. Does not own what ranks exchange (`runner/ulysses`, `runner/ring_context`).
"""

from __future__ import annotations

import dataclasses

from quire.compute.dist.context_groups import ContextGroups
from quire.compute.dist.exchange import Exchange
from quire.compute.forward.divided import DividedForward
from quire.compute.forward.ring import RingForward
from quire.compute.models.decoder import Decoder
from quire.compute.models.sent_rows import send_rows
from quire.compute.platform import Forwards, Platform
from quire.compute.runner.pool import KVPool
from quire.compute.runner.ring import Ring
from quire.compute.runner.tables import SlotTables
from quire.compute.runner.tail import Tail
from quire.compute.runner.ulysses import Ulysses
from quire.config.resolve import EngineLimits
from quire.core.ticker import ticking


def forwards_of(
    platform: Platform, model: Decoder, pool: KVPool, tables: SlotTables, tail: Tail, limits: EngineLimits,
    groups: ContextGroups | None, exchange: Exchange | None = None,
) -> Forwards:  # fmt: skip
    """The platform's, of a pool that may be one of several. Steps of a ring are not captured. exchange: where experts
    are divided among ranks that have other rows."""
    if exchange is not None:
        send_rows(model, exchange)
    if groups is None:
        return platform.forwards(model, pool, tables, tail, limits)
    device = platform.device
    ulysses = None if groups.heads is None else Ulysses(model, groups.heads)
    if groups.turns is not None:
        with ticking("building kernels"):
            model.build_kernels(limits.max_num_batched_tokens)
        ring = Ring(model, groups.turns)
        return Forwards([RingForward(device, model, pool, tables, ring, ulysses, groups.everyone)])
    assert ulysses is not None
    pool.across = ulysses
    forwards = platform.forwards(model, pool, tables, tail, limits)
    divided = DividedForward(device, model, pool, tables, ulysses)
    return dataclasses.replace(forwards, in_turn=[divided, *forwards.in_turn])
