"""`Comm` between processes on hosts, over torch.distributed's gloo: tensors in main memory."""

from __future__ import annotations

import datetime
from typing import Final

import torch
import torch.distributed

from quire.compute.dist.comm import Reduction

TIMEOUT_S: Final = 600.0
"""A rank that does not answer for so long is taken for dead: RuntimeError in the others. Loading takes minutes."""
OPERATIONS: Final = {
    Reduction.SUM: torch.distributed.ReduceOp.SUM,
    Reduction.MIN: torch.distributed.ReduceOp.MIN,
    Reduction.MAX: torch.distributed.ReduceOp.MAX,
}


class GlooComm:
    """`Comm` of a process with one rank; a process can be in one such group at a time."""

    def __init__(self, rank: int, size: int, meeting_point: str, timeout_s: float = TIMEOUT_S) -> None:
        """meeting_point: where all ranks find one another, 'tcp://HOST:PORT' of rank 0 or 'file:///PATH' of a new file.

        Returns when all are there. RuntimeError if they are not within timeout_s.
        """
        self.rank, self.size = rank, size
        timeout = datetime.timedelta(seconds=timeout_s)
        torch.distributed.init_process_group(
            "gloo", init_method=meeting_point, rank=rank, world_size=size, timeout=timeout
        )

    def all_reduce(self, x: torch.Tensor, reduction: Reduction = Reduction.SUM) -> torch.Tensor:
        """See `Comm`. x: on the CPU."""
        torch.distributed.all_reduce(x, OPERATIONS[reduction])
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """See `Comm`. x: on the CPU."""
        found = x.new_empty(self.size, *x.shape)
        torch.distributed.all_gather(list(found.unbind(0)), x)
        return found

    def close(self) -> None:
        """See `Comm`."""
        torch.distributed.destroy_process_group()
