"""`Comm` between processes, of one host or of several, over torch.distributed's gloo: tensors in main memory.

Owns a group of gloo's own making, not torch's global one: a process may be in several. What it waits for has names
that a profile shows.
Invariant: of one host nothing listens but on the loopback interface.
"""

from __future__ import annotations

import datetime
import functools
from typing import Any, Final

import torch
import torch.distributed
from torch.profiler import record_function

from quire.compute.dist.comm import Reduction, Sent
from quire.compute.dist.meeting import store_of
from quire.core.meeting import own_address

TIMEOUT_S: Final = 600.0
"""A rank that does not answer for so long is taken for dead: RuntimeError in the others. Loading takes minutes."""
_DISTRIBUTED: Final[Any] = torch.distributed
"""Whose types leave out the classes of groups."""
OPERATIONS: Final = {
    Reduction.SUM: torch.distributed.ReduceOp.SUM,
    Reduction.MIN: torch.distributed.ReduceOp.MIN,
    Reduction.MAX: torch.distributed.ReduceOp.MAX,
}


class Both:
    """`Sent` of two that are on their way."""

    def __init__(self, sent: Sent, found: Sent) -> None:
        self._sent, self._found = sent, found

    def wait(self) -> None:
        """See `Sent`."""
        self._found.wait()
        self._sent.wait()


class GlooComm:
    """`Comm` of one rank. It meets the others at `join`, or when something is first asked of it."""

    def __init__(self, rank: int, size: int, meeting_point: str, timeout_s: float = TIMEOUT_S) -> None:
        """meeting_point: see `core/meeting`."""
        self.rank, self.size = rank, size
        self.n_calls = 0
        """That this rank has begun: it is the one to look at where it is behind the others."""
        self._meeting_point, self._timeout = meeting_point, datetime.timedelta(seconds=timeout_s)

    @functools.cached_property
    def _group(self) -> Any:
        options = _DISTRIBUTED.ProcessGroupGloo._Options()
        options._devices = [_DISTRIBUTED.ProcessGroupGloo.create_device(hostname=own_address(self._meeting_point))]
        options._timeout = self._timeout
        store = store_of(self._meeting_point, self.size)
        return _DISTRIBUTED.ProcessGroupGloo(store, self.rank, self.size, options)

    def join(self) -> None:
        """Returns when all are there. RuntimeError if they are not in time."""
        self.all_reduce(torch.zeros(1))

    def all_reduce(self, x: torch.Tensor, reduction: Reduction = Reduction.SUM) -> torch.Tensor:
        """See `Comm`. x: on the CPU."""
        self.n_calls += 1
        options = _DISTRIBUTED.AllreduceOptions()
        options.reduceOp = OPERATIONS[reduction]
        with record_function("quire_ranks_all_reduce"):
            self._group.allreduce([x], options).wait()
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """See `Comm`. x: on the CPU."""
        self.n_calls += 1
        found = x.new_empty(self.size, *x.shape)
        with record_function("quire_ranks_all_gather"):
            self._group.allgather([list(found.unbind(0))], [x]).wait()
        return found

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        """See `MeetingComm`; sums are in float32, in the order of ranks."""
        n_rows = [x[0].numel()] * self.size
        found = self.all_to_all(x.flatten(), n_rows, n_rows).view_as(x)
        total = found[0].float()
        for term in found[1:]:
            total += term
        return total.to(x.dtype)

    def all_to_all(self, x: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        """See `MeetingComm`. x: on the CPU."""
        self.n_calls += 1
        found = x.new_empty(sum(received), *x.shape[1:])
        with record_function("quire_ranks_all_to_all"):
            self._group.alltoall_base(found, x, received, sent, _DISTRIBUTED.AllToAllOptions()).wait()
        return found

    def exchange(self, x: torch.Tensor, to: int, found: torch.Tensor, source: int) -> Sent:
        """See `MeetingComm`. x: on the CPU."""
        self.n_calls += 1
        return Both(self.send(x, to), self.receive(found, source))

    def send(self, x: torch.Tensor, to: int) -> Sent:
        """See `MeetingComm`."""
        sent: Sent = self._group.send([x], to, 0)
        return sent

    def receive(self, x: torch.Tensor, source: int) -> Sent:
        """See `MeetingComm`."""
        found: Sent = self._group.recv([x], source, 0)
        return found

    def all_within(self, limit_s: float) -> bool:
        """See `MeetingComm`."""
        try:
            self._group.allreduce([torch.zeros(1)]).wait(datetime.timedelta(seconds=limit_s))
        except RuntimeError:
            return False
        return True

    def abort(self) -> None:
        """Sockets end with the process of the other rank, and with them all waiting."""

    def close(self) -> None:
        """See `Comm`."""
        self.__dict__.pop("_group", None)
