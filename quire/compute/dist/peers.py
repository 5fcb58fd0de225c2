"""`Comm` between processes of one host with a GPU each: sums through memory that they share, the rest by NCCL.

Owns which way a sum goes. Does not own the kernels (`kernels/reduce`), nor NCCL's groups.
Invariants: all ranks go the same way, as it depends on shapes and types alone; a rank that has waited in vain for
another one says so at the host's next wait for results, before anybody sees them.
"""

from __future__ import annotations

import logging
from typing import Final

import torch

from quire.compute.dist.added import reduced_then_added
from quire.compute.dist.comm import MeetingComm, Reduction, Sent
from quire.core import env
from quire.core.errors import EngineError
from quire.kernels import gemm
from quire.kernels.gemm import Norm, sent
from quire.kernels.reduce import hopper
from quire.kernels.reduce.hopper import PeerMemory
from quire.planner.peers import LONGEST_BYTES, one_shot_bytes, sent_to_all_bytes

logger = logging.getLogger("quire.engine")

PART_ROWS: Final = 256
"""Of which the parts of a product that is sent have a multiple, but for the last."""

LEAVE_S: Final = 2.0
"""At the end all ranks let go of one another's memory within so much time; who does not is going to be killed."""


class PeerComm:
    """`MeetingComm` of one rank. Until `join` everything goes through `nccl`."""

    def __init__(
        self,
        nccl: MeetingComm,
        device: torch.device,
        one_shot: int | None = None,
        longest: int = LONGEST_BYTES,
        first: int = 0,
        to_all: int | None = None,
    ) -> None:
        """device: this rank's GPU. one_shot: bytes of the longest sum in one hop, None for `one_shot_bytes`; longest:
        in one launch. first: what its rank 0 is called, where these are some of more ranks. to_all: bytes of the
        longest term that a product sends to every rank, None for `sent_to_all_bytes`."""
        self.rank, self.size, self.n_calls = nccl.rank, nccl.size, 0
        self._nccl, self._device, self._first, self._is_void = nccl, device, first, False
        self._memory: PeerMemory | None = None
        self._one_shot = one_shot_bytes(self.size) if one_shot is None else one_shot
        self._longest = longest
        self._to_all = sent_to_all_bytes(self.size) if to_all is None else to_all
        self.sends_to = 0
        """Ranks to which products may send their terms themselves (`add_product`); 0: none does."""

    def join(self) -> None:
        """See `MeetingComm`."""
        self._nccl.join()
        if self._memory is None:
            self._memory = self._shared_memory()
            self.sends_to = 0 if self._memory is None else self.size

    def _shared_memory(self) -> PeerMemory | None:
        """None where any rank cannot reach the others."""
        is_off = env.read("QUIRE_PEER_MEMORY") == "0"
        if not self._all_have("QUIRE_PEER_MEMORY=0" if is_off else hopper.obstacle(self.size)):
            return None
        memory, reason = None, None
        try:
            memory = PeerMemory(self.rank, self.size, self._one_shot, self._longest)
        except RuntimeError as error:
            reason = str(error)
        if self._all_have(reason) and memory is not None and self._all_have(self._mapped(memory)):
            if self.rank == 0:
                logger.info(
                    "sums over %d GPUs go through memory that they share (%d MiB each)", self.size, memory.n_bytes >> 20
                )
            return memory
        if memory is not None:
            memory.close()
        return None

    def _mapped(self, memory: PeerMemory) -> str | None:
        """Why this rank cannot reach the memory of another one, or None."""
        handle = torch.frombuffer(bytearray(memory.handle), dtype=torch.uint8).to(self._device)
        handles = self._nccl.all_gather(handle).cpu().numpy()
        try:
            memory.map([one.tobytes() for one in handles])
        except RuntimeError as error:
            return str(error)
        return None

    def _all_have(self, reason: str | None) -> bool:
        """Whether no rank has a reason against it. All ranks ask together."""
        if reason:
            logger.warning(
                "rank %d: all sums over GPUs go through NCCL, short ones more slowly: %s",
                self._first + self.rank,
                reason,
            )
        return bool(self._nccl.all_reduce(torch.tensor([not reason], dtype=torch.int32), Reduction.MIN).item())

    def _way(self, x: torch.Tensor, residual: torch.Tensor | None = None, norm: Norm | None = None) -> bool | None:
        """Whether x goes in two shots; None: through NCCL."""
        if self._memory is None or x.device != self._device:
            return None
        if self._memory.misfit(x, residual, norm):
            return None
        return min(x.nbytes, self._longest) > self._one_shot

    def _reduce(
        self, two_shots: bool, x: torch.Tensor, residual: torch.Tensor | None, norm: Norm | None
    ) -> torch.Tensor | None:
        assert self._memory is not None
        self.n_calls += 1
        return self._memory.reduce(x, residual, norm, two_shots=two_shots)

    def all_reduce(self, x: torch.Tensor, reduction: Reduction = Reduction.SUM) -> torch.Tensor:
        """See `Comm`."""
        two_shots = self._way(x) if reduction is Reduction.SUM else None
        if two_shots is None:
            self.n_calls += 1
            return self._nccl.all_reduce(x, reduction)
        self._reduce(two_shots, x, None, None)
        return x

    def add_reduced(self, z: torch.Tensor, x: torch.Tensor, norm: Norm | None = None) -> torch.Tensor | None:
        """See `AddReduced`."""
        two_shots = self._way(z, x, norm)
        if two_shots is None:
            return reduced_then_added(self, z, x, norm)
        return self._reduce(two_shots, z, x, norm)

    def add_product(
        self, y: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, x: torch.Tensor, norm: Norm | None
    ) -> torch.Tensor | None:
        """See `RankSum.add_product`: of many rows the product sends its term to those who sum it."""
        memory = self._memory
        if memory is None or x.device != self._device or memory.misfit(x, x, norm):
            return self.add_reduced(gemm.linear(y, w, bias), x, norm)
        row_bytes = x.shape[1] * x.itemsize
        to_all = x.nbytes <= self._to_all
        most = memory.most_sent_rows(row_bytes, to_all=to_all)
        n_parts = -(-len(x) // most)
        step = min(-(-len(x) // n_parts // PART_ROWS) * PART_ROWS, most)
        parts = [slice(begin, begin + step) for begin in range(0, len(x), step)]
        products = [sent.prepare(y[part], w, self.size, bias is not None) for part in parts]
        if any(isinstance(product, str) for product in products):
            return self.add_reduced(gemm.linear(y, w, bias), x, norm)
        normed = None if norm is None else torch.empty_like(x)
        for part, product in zip(parts, products, strict=True):
            assert not isinstance(product, str)
            self.n_calls += 1
            sent.send(product, y[part], w, bias, memory.places(to_all=to_all))
            memory.reduce_sent(x[part], norm, None if normed is None else normed[part], to_all=to_all)
        return normed

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """See `Comm`. x: on the GPU."""
        self.n_calls += 1
        return self._nccl.all_gather(x)

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        """See `MeetingComm`; through NCCL."""
        self.n_calls += 1
        return self._nccl.reduce_scatter(x)

    def all_to_all(self, x: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        """See `MeetingComm`; through NCCL."""
        self.n_calls += 1
        return self._nccl.all_to_all(x, sent, received)

    def exchange(self, x: torch.Tensor, to: int, found: torch.Tensor, source: int) -> Sent:
        """See `MeetingComm`."""
        self.n_calls += 1
        return self._nccl.exchange(x, to, found, source)

    def send(self, x: torch.Tensor, to: int) -> Sent:
        """See `MeetingComm`."""
        return self._nccl.send(x, to)

    def receive(self, x: torch.Tensor, source: int) -> Sent:
        """See `MeetingComm`."""
        return self._nccl.receive(x, source)

    def check(self) -> None:
        """Raises EngineError if this rank has given up waiting for another one."""
        lost = None if self._memory is None else self._memory.lost
        if lost is not None:
            raise EngineError(
                f"rank {self._first + self.rank} has waited in vain for rank {self._first + lost[0]} in sum {lost[1]}"
                " over GPUs: that rank hangs or is gone (its log says more); the engine has to be started again"
            )

    def all_within(self, limit_s: float) -> bool:
        """See `MeetingComm`."""
        return self._nccl.all_within(limit_s)

    def abort(self) -> None:
        """See `MeetingComm`."""
        self._is_void = True
        memory = self._memory
        if memory is not None:
            memory.give_up()
        self._nccl.abort()

    def close(self) -> None:
        """See `Comm`. No rank's memory is given back while another one has it mapped."""
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.unmap()
            if not self._is_void:
                self._nccl.all_within(LEAVE_S)
            memory.close()
        self._nccl.close()
