"""What ranks have found once their weights are loaded: the worst of all, and of each stage.

Owns how they hear of one another's. Does not own what follows for the pages (`engine/capacity`).
"""

from __future__ import annotations

import dataclasses

import torch

from quire.compute.dist.comm import Comm, Reduction
from quire.planner.memory import Room


@dataclasses.dataclass(frozen=True, slots=True)
class StageFacts:
    """Of the ranks of one stage, as `WorkerFacts` of all."""

    weights_bytes: int
    """With the places of adapters, which stay as long."""
    others_bytes: int
    room: Room
    places_bytes: int = 0
    """Of those places, which are no weights of the model."""

    @property
    def model_bytes(self) -> int:
        """Of the weights alone."""
        return self.weights_bytes - self.places_bytes


@dataclasses.dataclass(frozen=True, slots=True)
class WorkerFacts:
    """What control needs to know of loaded ranks; of several what holds for all: the most taken, the least free."""

    n_ranks: int
    device: str
    """Kind of device, as `Platform.name`."""
    dtype: str
    """Of activations, and of weights that are not quantised."""
    weights_bytes: int
    """Of one rank, as it holds them, with the places of adapters."""
    others_bytes: int
    """Of a device's own memory, in use before the worker came; 0 in main memory."""
    room: Room
    """What there is now that the weights are loaded."""
    stages: tuple[StageFacts, ...]
    """Of each stage, of which there may be one."""


def of_stages(own: StageFacts, stage: int, n_stages: int, comm: Comm) -> tuple[StageFacts, ...]:
    """Of each stage the worst that a rank of it has found. own: what this one has, which is of `stage`; every rank of
    `comm` calls it."""
    room = own.room
    least = torch.full((n_stages, 4), torch.iinfo(torch.int64).max)
    least[stage] = torch.tensor([room.total_bytes, room.free_bytes, room.swap_bytes, room.address_bytes])
    most = torch.zeros((n_stages, 4), dtype=torch.int64)
    most[stage] = torch.tensor([own.weights_bytes, own.others_bytes, room.own_bytes, own.places_bytes])
    least, most = comm.all_reduce(least, Reduction.MIN), comm.all_reduce(most, Reduction.MAX)
    found = []
    for room_facts, (weights, others, taken, places) in zip(least.tolist(), most.tolist(), strict=True):
        total, free, swap, address = room_facts
        found.append(StageFacts(weights, others, Room(total, free, room.is_main, swap, address, taken), places))
    return tuple(found)
