"""`Comm` between processes with a GPU each, of one host or of several, over torch.distributed's NCCL. Its calls can be
captured.

Owns a group of its own making, and the settings that NCCL reads when the first is made.
Invariants: no NVLink multicast, which on a shared host can put the GPUs out of service; tensors that are not on the
GPU travel over it.
"""

from __future__ import annotations

import datetime
import functools
import threading
import time
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed

from quire.compute.dist.comm import Reduction, Sent
from quire.compute.dist.meeting import store_of
from quire.core import env

TIMEOUT_S: Final = 600.0
ABORT_S: Final = 5.0
"""An abort takes less once the captured graphs are gone."""
LOOK_S: Final = 0.001
"""Between two looks at whether all have come."""
NO_MULTICAST: Final = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}
_DISTRIBUTED: Final[Any] = torch.distributed
"""Whose types leave out the classes of groups."""


class PendingReceive:
    """A receive that is posted when somebody waits for it, and not before: NCCL's kernel holds multiprocessors of the
    GPU until the message comes, and products that have only the others take longer."""

    def __init__(self, post: Callable[[], Sent]) -> None:
        self._post: Callable[[], Sent] | None = post

    def wait(self) -> None:
        """See `Sent`."""
        post, self._post = self._post, None
        if post is not None:
            post().wait()


class NcclComm:
    """`MeetingComm` of one rank."""

    def __init__(
        self, rank: int, size: int, meeting_point: str, device: torch.device, timeout_s: float = TIMEOUT_S
    ) -> None:
        """meeting_point: see `core/meeting`. device: this rank's GPU."""
        self.rank, self.size, self.n_calls = rank, size, 0
        self._meeting_point, self._device, self._is_void = meeting_point, device, False
        self._timeout = datetime.timedelta(seconds=timeout_s)
        self._aborting: threading.Thread | None = None
        self._operations = {
            Reduction.SUM: _DISTRIBUTED.ReduceOp.SUM,
            Reduction.MIN: _DISTRIBUTED.ReduceOp.MIN,
            Reduction.MAX: _DISTRIBUTED.ReduceOp.MAX,
        }
        for name, value in NO_MULTICAST.items():
            env.force(name, value)

    @functools.cached_property
    def _group(self) -> Any:
        options = _DISTRIBUTED.ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        store = store_of(self._meeting_point, self.size)
        return _DISTRIBUTED.ProcessGroupNCCL(store, self.rank, self.size, options)

    def join(self) -> None:
        """See `MeetingComm`."""
        self.all_reduce(torch.zeros(1)).item()

    def all_reduce(self, x: torch.Tensor, reduction: Reduction = Reduction.SUM) -> torch.Tensor:
        """See `Comm`."""
        if x.device != self._device:
            return x.copy_(self.all_reduce(x.to(self._device), reduction))
        self.n_calls += 1
        options = _DISTRIBUTED.AllreduceOptions()
        options.reduceOp = self._operations[reduction]
        self._group.allreduce([x], options).wait()
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """See `Comm`. x: on the GPU."""
        self.n_calls += 1
        found = x.new_empty(self.size, *x.shape)
        self._group._allgather_base(found, x).wait()
        return found

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        """See `MeetingComm`. x: on the GPU."""
        self.n_calls += 1
        found = torch.empty_like(x[0])
        self._group._reduce_scatter_base(found, x, _DISTRIBUTED.ReduceScatterOptions()).wait()
        return found

    def all_to_all(self, x: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        """See `MeetingComm`. x: on the GPU."""
        self.n_calls += 1
        found = x.new_empty(sum(received), *x.shape[1:])
        self._group.alltoall_base(found, x, received, sent, _DISTRIBUTED.AllToAllOptions()).wait()
        return found

    def exchange(self, x: torch.Tensor, to: int, found: torch.Tensor, source: int) -> Sent:
        """See `MeetingComm`. Both in one launch: apart each rank would wait for the next one to receive."""
        self.n_calls += 1
        return self._grouped(lambda: self._group.send([x], to, 0), lambda: self._group.recv([found], source, 0))

    def send(self, x: torch.Tensor, to: int) -> Sent:
        """See `MeetingComm`. x: on the GPU, in the order of its current stream."""
        return self._grouped(lambda: self._group.send([x], to, 0))

    def receive(self, x: torch.Tensor, source: int) -> Sent:
        """See `MeetingComm`. x: on the GPU."""
        return PendingReceive(lambda: self._grouped(lambda: self._group.recv([x], source, 0)))

    def _grouped(self, *calls: Callable[[], object]) -> Sent:
        """In one launch, and through this group: alone each would make a communicator of two ranks."""
        self._group._start_coalescing()
        for call in calls:
            call()
        begun: Sent = self._group._end_coalescing()
        return begun

    def all_within(self, limit_s: float) -> bool:
        """See `MeetingComm`. NCCL's own wait would have the host sleep until `timeout_s`."""
        end_s = time.monotonic() + limit_s
        work = self._group.allreduce([torch.zeros(1, device=self._device)])
        while not work.is_completed():
            if time.monotonic() > end_s:
                self.abort()
                return False
            time.sleep(LOOK_S)
        return True

    def abort(self) -> None:
        """See `MeetingComm`. A kernel that waits for the other rank ends; then NCCL waits for captured graphs that hold
        its calls, in a thread: whoever calls this may hold them."""
        self._is_void = True
        group = self.__dict__.get("_group")
        if group is not None and self._aborting is None:
            self._aborting = threading.Thread(target=group.abort, name="quire-abort", daemon=True)
            self._aborting.start()

    def close(self) -> None:
        """See `Comm`. Captured graphs that hold its calls must be gone: NCCL waits for them, and nothing ends that."""
        group = self.__dict__.get("_group")
        if self._aborting is not None:
            self._aborting.join(ABORT_S)
        elif group is not None and not self._is_void:
            group.shutdown()
        self.__dict__.pop("_group", None)
