"""`quire bench` of one of several ranks that is alone, on one GPU: its steps, with sums that wait for nobody.

    python -m benchmarks.rank_alone 4 latency --model shape:llama-3.1-70b --batch-size 1 --input-len 128

Weights, products, attention and the kernel of sums are those of rank 0 of so many. Cells that it sends come back to its
own memory, as if each other rank had sent the same, and all sums take one hop: they take less than over links, and move
more within the memory. What is measured is the rest of the step, and what stands beside a sum. Answers mean nothing.
"""

from __future__ import annotations

import sys
from typing import Any, Final

import torch

from quire.cli.main import main
from quire.compute.dist.comm import Reduction
from quire.compute.dist.peers import LONGEST_BYTES, PeerComm
from quire.engine import workers
from quire.kernels.reduce.hopper import CELL_BYTES, PeerMemory

KEPT: Final[list[PeerComm]] = []
"""Until the process ends: their memory is mapped nowhere, so nothing of it can be given back."""


class Nobody:
    """`MeetingComm` of rank 0 of `size` where no other rank is: they are taken to have what it has."""

    rank, n_calls = 0, 0

    def __init__(self, size: int) -> None:
        self.size = size

    def join(self) -> None:
        """Nobody is to come."""

    def all_reduce(self, x: torch.Tensor, reduction: Reduction = Reduction.SUM) -> torch.Tensor:
        """x as it is."""
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """x of every rank."""
        return x.expand(self.size, *x.shape).contiguous()

    def close(self) -> None:
        """There is no group."""


class AlonePeers(PeerComm):
    """Sums by the kernel of sums."""

    def _mapped(self, memory: PeerMemory) -> str | None:
        peers = memory._peers
        for other in range(1, self.size):  # what is sent to it lands where it would have sent to
            peers.base[other] = peers.base[0] + other * peers.part_cells * CELL_BYTES
        return None


def run(n_ranks: int, command: list[str]) -> int:
    """`quire bench` on rank 0 of so many."""

    def groups(config: object, platform: Any, rank: int, meeting_point: str) -> tuple[Any, None]:
        others: Any = Nobody(n_ranks)
        if platform.name != "cuda":
            return others, None
        comm = AlonePeers(others, platform.device.torch_device, one_shot=LONGEST_BYTES)
        comm.join()
        KEPT.append(comm)
        return comm, None

    workers._groups = groups
    return main(["bench", *command])


if __name__ == "__main__":
    sys.exit(run(int(sys.argv[1]), sys.argv[2:]))
