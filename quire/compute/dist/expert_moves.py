"""Matrices of experts on their way to other slots, of this rank or another one.

Owns the pieces in which they travel. Does not own who goes where (`planner/expert_placement`).
Invariants: all ranks call it, with the same slots; no more is held beside the matrices than `limit_bytes`; in each
piece all is sent before anything is overwritten, so that experts may change places.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.compute.dist.comm import MeetingComm
from quire.planner.expert_placement import sources


def open_ways(comm: MeetingComm, device: torch.device) -> None:
    """All ranks send a byte to all, before memory for pages is measured: NCCL takes buffers of the device for each way
    when it is first used, which would be in the middle of the service."""
    one_each = [1] * comm.size
    comm.all_to_all(torch.zeros(comm.size, 1, dtype=torch.uint8, device=device), one_each, one_each)


def move(
    comm: MeetingComm,
    old: Sequence[int],
    new: Sequence[int],
    tensors: Sequence[Sequence[torch.Tensor]],
    limit_bytes: int,
) -> int:
    """old, new: the expert in each slot of all ranks. tensors: of each slot of this rank, contiguous, alike in all.
    → bytes that this rank has taken."""
    own = len(tensors)
    moves = sources(old, new, comm.size)
    if not moves:
        return 0
    mine = range(comm.rank * own, (comm.rank + 1) * own)
    sends = sorted((target // own, source, target) for source, target in moves if source in mine)
    takes = sorted((source // own, source, target) for source, target in moves if target in mine)
    sent, received = ([sum(one[0] == rank for one in both) for rank in range(comm.size)] for both in (sends, takes))
    most = max(
        sum(slot // own == rank for slot in side) for side in zip(*moves, strict=True) for rank in range(comm.size)
    )
    n_bytes = 0
    for place in range(len(tensors[0])):
        flat = [of_slot[place].view(-1).view(torch.uint8) for of_slot in tensors]
        step = max(1, limit_bytes // (2 * most))
        for at in range(0, len(flat[0]), step):
            piece = slice(at, at + step)
            rows = [flat[source - mine.start][piece] for _, source, _ in sends]
            packed = torch.stack(rows) if rows else flat[0].new_empty(0, len(flat[0][piece]))
            found = comm.all_to_all(packed, sent, received)
            for row, (_, _, target) in zip(found, takes, strict=True):
                flat[target - mine.start][piece] = row
            n_bytes += found.numel()
    return n_bytes
