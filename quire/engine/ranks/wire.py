"""What rank 0 says to the other ranks.

Owns the messages: a plan, masks or an order, told apart by a first byte. Does not own how they travel (`ring.py`).
"""

from __future__ import annotations

import struct
from typing import Final

import msgspec

from quire.compute.worker import Allocation
from quire.core.balance import BalanceStage
from quire.core.plan import StepMasks, StepPlan

PLAN, MASKS, ORDER = b"P", b"M", b"O"
_STEP: Final = struct.Struct("<q")


class Allocate(msgspec.Struct, tag="allocate"):
    """Take memory for pages, and run a first step."""

    allocation: Allocation


class Measure(msgspec.Struct, tag="measure"):
    """Measure what steps with drafts take, see `Worker.draft_costs`."""


class SleepRanks(msgspec.Struct, tag="sleep"):
    """Give memory up, see `Worker.sleep`."""

    level: int


class WakeRanks(msgspec.Struct, tag="wake"):
    """Take it again."""


class TakeTokens(msgspec.Struct, tag="take_tokens"):
    """All results are told: receive what was sent, see `Runner.take_all`."""


class TellLoads(msgspec.Struct, tag="tell_loads"):
    """Who says results says how many tokens chose each expert, see `Worker.expert_loads`."""


class BalanceExperts(msgspec.Struct, tag="balance_experts"):
    """See `ExpertBalancer.do`."""

    stage: BalanceStage


class ReadAdapter(msgspec.Struct, tag="read_adapter"):
    """Read a rank's part of an adapter from its folder, beside steps, and say so: see `adapters.py`."""

    number: int
    """Of the reading."""
    path: str
    root: str
    content_id: str
    """What rank 0 has found there."""


class KeepAdapter(msgspec.Struct, tag="keep_adapter"):
    """Keep what was read, for plans that put it into a place; it has answered well."""

    number: int
    content_id: str


class ForgetAdapter(msgspec.Struct, tag="forget_adapter"):
    """What was read is not kept: another rank could not read it."""

    number: int


class DropAdapter(msgspec.Struct, tag="drop_adapter"):
    """Keep it no longer."""

    content_id: str


class Stop(msgspec.Struct, tag="stop"):
    """Leave."""


AdapterOrder = ReadAdapter | KeepAdapter | ForgetAdapter | DropAdapter
Order = Allocate | Measure | SleepRanks | WakeRanks | TakeTokens | TellLoads | BalanceExperts | AdapterOrder | Stop
Said = StepPlan | StepMasks | Order


_encoder: Final = msgspec.msgpack.Encoder()
_plans: Final = msgspec.msgpack.Decoder(StepPlan)
_orders: Final = msgspec.msgpack.Decoder(Order)


def encode(said: Said) -> bytes:
    """A message."""
    match said:
        case StepPlan():
            return PLAN + _encoder.encode(said)
        case StepMasks(step, bits):
            return MASKS + _STEP.pack(step) + bytes(bits)
    return ORDER + _encoder.encode(said)


def decode(data: bytes) -> Said:
    """What a message says."""
    rest = memoryview(data)[1:]
    match data[:1]:
        case b"P":
            return _plans.decode(rest)
        case b"M":
            (step,) = _STEP.unpack(rest[: _STEP.size])
            return StepMasks(step, rest[_STEP.size :])
    found: Order = _orders.decode(rest)
    return found
