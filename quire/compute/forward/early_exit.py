"""Early exit: a token is chosen from an inner layer's state where the head is sure of it; a CPU, for `bench tradeoffs`.

Owns which rows leave early, and the states of those whose other layers wait. Does not own the layers nor the choice.
Invariant: keys and values are exact. Layers that a token skipped are computed for it, from its own state there, beside
those of the next token of its sequence that does not leave early, as in FREE (Bae et al. 2023) and EE-LLM (Chen et al.
2023). CALM (Schuster et al. 2022) hands the last state to all layers above instead: cheaper, and not exact.

A sequence that ends early leaves pages without keys of the upper layers: not for engines with a prefix cache.
"""

from __future__ import annotations

import dataclasses
from typing import Final

import numpy as np
import torch

from quire.compute.device.device import Device
from quire.compute.forward.fused import new_fused_step, step_rows
from quire.compute.forward.obstacle import obstacle
from quire.compute.models.decoder import Decoder
from quire.compute.runner.pool import KVPool
from quire.compute.runner.step import States, Step
from quire.compute.runner.tables import SlotTables
from quire.compute.runner.tail import Tail
from quire.compute.sample.sampler import Sampled
from quire.core.errors import EngineError
from quire.kernels.fused_step import FusedStep
from quire.kernels.qgemm.cpu import WIDEN

MOST_WAITING: Final = 31
"""Tokens of a sequence in a row that leave early; the next one does not."""

Arrays = tuple[np.ndarray, ...]
"""As `FusedStep.run` takes them."""


@dataclasses.dataclass(frozen=True, slots=True)
class ExitRule:
    """A token leaves after the first `layer` layers if the head, asked there, gives its best one this probability."""

    layer: int
    """At least 1, less than the model has."""
    threshold: float
    """More than 1: none leaves."""


def exit_obstacle(model: Decoder, rule: ExitRule) -> str | None:
    """Why there is no such early exit of this model here, or None."""
    if not 0 < rule.layer < len(model.layers):
        return f"layer {rule.layer} is none to leave after: the model has {len(model.layers)}"
    return obstacle(model)


class EarlyExitForward:
    """`Forward` that takes every step of an engine without drafts, adapters, forks and prefix cache; there must be no
    `exit_obstacle`. States of rows that leave early are those of the layer where they leave."""

    def __init__(
        self,
        device: Device,
        model: Decoder,
        pool: KVPool,
        tables: SlotTables,
        tail: Tail,
        rule: ExitRule,
        *,
        max_rows: int,
    ) -> None:
        """max_rows: of a step."""
        self._rule, self._tail = rule, tail
        n_slots, width, dtype = tables.spare_slot, model.arch.hidden_size, model.dtype
        n_rows = max_rows + n_slots * MOST_WAITING
        memory = step_rows(device, model, pool, n_rows)
        self._x, self._probed = memory.x, device.zeros((max_rows, width), dtype)
        self._logits = [device.zeros((max_rows, model.arch.vocab_size), torch.float32) for _ in range(2)]
        self._waiting = device.zeros((n_slots, MOST_WAITING, width), dtype)
        """States after the layer of the rule, of each slot's tokens that left there."""
        self._n_waiting = np.zeros(n_slots, np.int64)
        self._lower, self._upper = new_fused_step(model, tables), new_fused_step(model, tables)
        self._lower.embed(model.embed.weight, self._x)
        for layer in model.layers[: rule.layer]:
            layer.record(self._lower, memory, is_last=False)
        norm = model.norm.pair
        assert norm is not None, "a plain model has one that products take in"
        self._lower.norm(self._x, norm, self._probed)
        self._lower.take(self._probed)
        model.head.record(self._lower, self._probed, self._logits[0], then=WIDEN)
        for layer in model.layers[rule.layer :]:
            layer.record(self._upper, memory, is_last=layer is model.layers[-1])
        tail.record(self._upper, self._x, self._logits[1])
        self.n_tokens = self.n_exits = 0
        """Chosen so far in steps of one token a sequence, and those of them that left early."""

    def stage(self, _: Step) -> None:
        """A host computes when it is called."""

    def run(self, step: Step) -> States:
        """All rows go through the lower layers; spans whose token is not sure go on, with what waits of theirs."""
        self._check(step)
        batch = step.batch
        n_rows = len(batch.row_slots)
        wanted = np.arange(n_rows) if step.wants_all else batch.sampled_rows
        controls = None if step.wants_all else self._tail.native_controls(step)
        arrays = batch.row_slots, batch.row_positions, batch.q_indptr, batch.kv_lens, batch.span_slots
        chosen = _run(self._lower, self._logits[0][:, : self._tail.vocab_limit], controls, (*arrays, wanted))
        hidden, logits = self._x[:n_rows][torch.from_numpy(wanted)], self._logits[0][: len(wanted)]
        sure = self._confidence(logits) >= self._rule.threshold
        span_of = np.searchsorted(batch.q_indptr, wanted, side="right") - 1
        goes = np.ones(len(batch.span_slots), bool)
        if not step.wants_all:
            lengths = np.diff(batch.q_indptr)
            leaves = sure & (lengths[span_of] == 1) & (self._n_waiting[batch.span_slots[span_of]] < MOST_WAITING)
            goes[span_of[leaves]] = False
            self.n_tokens += int((lengths[span_of] == 1).sum())
            self.n_exits += int(leaves.sum())
            sure = ~goes[span_of]
            self._keep(batch.span_slots[~goes], batch.q_indptr[:-1][~goes])
        if goes.any():
            upper, rows = self._go_on(batch.q_indptr, batch.kv_lens, batch.span_slots, goes, wanted[goes[span_of]])
            own = None if controls is None else np.ascontiguousarray(controls[:, goes[span_of]])
            late = _run(self._upper, self._logits[1][:, : self._tail.vocab_limit], own, upper)
            to, of = np.flatnonzero(~sure), np.flatnonzero(~sure[goes[span_of]])
            hidden[to] = self._x[:rows][of]
            logits[to] = self._logits[1][:rows][of]
            if chosen is not None and late is not None:
                for first, second in zip(chosen, late, strict=True):
                    first[to] = second[of]
        sampled = None if chosen is None else Sampled(torch.from_numpy(chosen[0]), torch.from_numpy(chosen[1]), None)
        return States(
            hidden, has_all=step.wants_all, logits=None if step.wants_all else logits,
            choose=None if sampled is None else lambda _: sampled,
        )  # fmt: skip

    def _check(self, step: Step) -> None:
        """Slots that open or close have nothing waiting."""
        plan = step.plan
        if plan.copies or step.adapters is not None or step.batch.trees is not None or any(plan.spans.n_drafts):
            raise EngineError("early exit is for steps without copied pages, adapters and drafts")
        for slot in (*plan.closed, *(opened.slot for opened in plan.opened)):
            self._n_waiting[slot] = 0

    def _confidence(self, logits: torch.Tensor) -> np.ndarray:
        """float32 [m]: the probability of each row's best token."""
        known = logits[:, : self._tail.vocab_limit]
        found: np.ndarray = (known.amax(-1) - known.logsumexp(-1)).exp().numpy()
        return found

    def _keep(self, slots: np.ndarray, rows: np.ndarray) -> None:
        """Of each slot one row, whose other layers wait."""
        self._waiting[torch.from_numpy(slots).long(), torch.from_numpy(self._n_waiting[slots])] = self._x[rows]
        self._n_waiting[slots] += 1

    def _go_on(
        self, q_indptr: np.ndarray, kv_lens: np.ndarray, span_slots: np.ndarray, goes: np.ndarray, wanted: np.ndarray
    ) -> tuple[Arrays, int]:
        """Put what the upper layers are to compute into the rows; its arrays, and how many of them are wanted.

        A span that goes, of a slot with two waiting tokens and three rows:  w w r r r   (w: from `_waiting`)
        """
        lengths, slots = np.diff(q_indptr).astype(np.int64), span_slots[goes]
        n_old = self._n_waiting[slots]
        totals = n_old + lengths[goes]
        indptr = np.concatenate([[0], np.cumsum(totals)])
        within = np.arange(indptr[-1]) - np.repeat(indptr[:-1], totals)
        row_slots = np.repeat(slots.astype(np.int64), totals)
        positions = within + np.repeat(kv_lens[goes] - totals, totals)
        is_old = within < np.repeat(n_old, totals)
        of_step = np.flatnonzero(np.repeat(goes, lengths))
        new = np.flatnonzero(~is_old)
        rows = torch.empty((len(within), self._x.shape[1]), dtype=self._x.dtype)
        rows[torch.from_numpy(new)] = self._x[torch.from_numpy(of_step)]
        old = np.flatnonzero(is_old)
        rows[torch.from_numpy(old)] = self._waiting[torch.from_numpy(row_slots[old]), torch.from_numpy(within[old])]
        self._x[: len(rows)] = rows
        self._n_waiting[slots] = 0
        at = new[np.searchsorted(of_step, wanted)]
        return (row_slots, positions, indptr.astype(np.int32), kv_lens[goes], slots, at), len(at)


def _run(
    fused: FusedStep, logits: torch.Tensor, controls: np.ndarray | None, arrays: Arrays
) -> tuple[np.ndarray, np.ndarray] | None:
    """Token ids and status of the rows wanted, where they can be chosen in the same call."""
    if controls is None:
        fused.run(*arrays)
        return None
    call, token_ids, status = fused.choosing(logits, controls, *arrays)
    call.run()
    return token_ids, status
