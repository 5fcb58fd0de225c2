"""`ExpertBalancer`: moves experts of one rank to where the loads of a window say that they should be (EPLB).

Owns when loads are taken, and the moves of each layer. Does not own which expert goes where (`planner/
expert_placement`), how matrices travel (`dist/expert_moves`), nor when it is told to (`engine/executors/balancing`).
Invariants: all ranks are told the same, between the same steps; a layer's map changes with its matrices, so that a step
sees both old or both new; ranks choose alike, as they see the same loads.
"""

from __future__ import annotations

import collections
import logging
import statistics
import time

import msgspec
import torch

from quire.compute.dist.comm import MeetingComm
from quire.compute.dist.expert_moves import move
from quire.compute.layers.expert_copies import ExpertCopies
from quire.compute.layers.experts import Experts, experts_of
from quire.compute.worker import Worker
from quire.config.eplb import EplbConfig
from quire.core.balance import BalanceFacts, BalanceStage
from quire.core.errors import ConfigError
from quire.core.units import format_bytes
from quire.planner.expert_placement import imbalance, rearranged

logger = logging.getLogger("quire.engine")


class ExpertBalancer:
    """Of one rank, whose model is loaded."""

    def __init__(self, worker: Worker, comm: MeetingComm, eplb: EplbConfig, limit_bytes: int) -> None:
        """comm: of all ranks. limit_bytes: for experts on their way, which a step's activations have at other times.
        ConfigError where experts are stored so that they cannot move."""
        self._worker, self._comm, self.eplb, self._limit_bytes = worker, comm, eplb, limit_bytes
        self._before = torch.empty(0)
        self._pending: collections.deque[tuple[int, list[int]]] = collections.deque()
        """Numbers of layers, which sleep may take away, and where their experts go."""
        self.facts = self._coming = BalanceFacts()
        """Up to the last rearrangement that is done, and of the one that goes on."""
        for layer in self._layers():
            _check_alike(layer)

    @property
    def n_pending(self) -> int:
        """Layers that are yet to be moved."""
        return len(self._pending)

    def do(self, stage: BalanceStage) -> None:
        """What all ranks do between two steps."""
        match stage:
            case BalanceStage.MARK:
                self._before = self._loads()
            case BalanceStage.PLAN:
                self._plan()
            case BalanceStage.MOVE:
                self._move()

    def rest(self) -> None:
        """Before sleep, on all ranks: layers that are yet to be moved stay, and what was said of loads is void, since
        weights that are read again lie as at the start."""
        self._pending.clear()
        self.facts = self._coming = msgspec.structs.replace(self._coming, before=0.0, after=0.0)

    def _layers(self) -> list[Experts]:
        return experts_of(self._worker.model.layers)

    def _loads(self) -> torch.Tensor:
        return torch.cat([layer.load for layer in self._layers()])

    def _plan(self) -> None:
        start_s = time.perf_counter()
        before, after, at = [], [], 0
        counts: list[int] = self._comm.all_reduce(self._loads() - self._before).tolist()
        self._pending.clear()
        for number, layer in enumerate(self._layers()):
            loads, copies = counts[at : at + len(layer.load)], _copies(layer)
            at += len(loads)
            chosen = rearranged(loads, copies.slots, copies.n_ranks)
            if chosen != copies.slots:
                self._pending.append((number, chosen))
            if any(loads):
                before.append(imbalance(loads, copies.slots, copies.n_ranks))
                after.append(imbalance(loads, chosen, copies.n_ranks))
        self._coming = msgspec.structs.replace(
            self.facts, n_rearranged=self.facts.n_rearranged + 1, before=statistics.fmean(before or [0.0]),
            after=statistics.fmean(after or [0.0]), last_s=0.0, longest_s=0.0,
        )  # fmt: skip
        self._count(0, 0, time.perf_counter() - start_s)

    def _move(self) -> None:
        number, chosen = self._pending.popleft()
        layer = self._layers()[number]
        copies, device = _copies(layer), self._worker.platform.device
        device.synchronize()  # steps that are queued are not a part of it
        start_s = time.perf_counter()
        n_moved = sum(old != new for old, new in zip(copies.slots, chosen, strict=True))
        n_bytes = move(self._comm, copies.slots, chosen, layer.slot_tensors(), self._limit_bytes)
        copies.put(chosen)
        device.synchronize()
        self._count(n_moved, n_bytes, time.perf_counter() - start_s)

    def _count(self, n_moved: int, n_bytes: int, took_s: float) -> None:
        coming = self._coming
        self._coming = coming = msgspec.structs.replace(
            coming, n_moved=coming.n_moved + n_moved, moved_bytes=coming.moved_bytes + n_bytes,
            last_s=coming.last_s + took_s, longest_s=max(coming.longest_s, took_s),
        )  # fmt: skip
        if self._pending:
            return
        last, self.facts = self.facts, coming
        if self._comm.rank:  # rank 0 says it for all
            return
        logger.info(
            "experts rearranged: the most loaded rank had %.2f times the mean load, and would have %.2f now; %d slots"
            " changed, rank 0 took %s; steps stood still for %.1f ms, at most %.1f at once",
            coming.before, coming.after, coming.n_moved - last.n_moved,
            format_bytes(coming.moved_bytes - last.moved_bytes), coming.last_s * 1e3, coming.longest_s * 1e3,
        )  # fmt: skip


def _copies(layer: Experts) -> ExpertCopies:
    assert layer.copies is not None
    return layer.copies


def _check_alike(layer: Experts) -> None:
    """ConfigError where an expert of one slot would not fit another one."""
    kinds = {tuple((tuple(one.shape), one.dtype) for one in slot) for slot in layer.slot_tensors()}
    can_move = all(one.layout is torch.strided and one.is_contiguous() for slot in layer.slot_tensors() for one in slot)
    if len(kinds) > 1 or not can_move:
        what = "in several ways" if len(kinds) > 1 else "in a layout of another library"
        raise ConfigError(
            f"enable_eplb = True, but experts of a layer are stored {what}, so that they cannot move: leave"
            " --enable-eplb out, or give a checkpoint whose experts are all alike",
            param="enable_eplb",
        )
