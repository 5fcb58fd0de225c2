"""A step kernel by kernel: any step on any device, and the oracle of the other strategies."""

from __future__ import annotations

import numpy as np
import torch

from quire.compute.device.device import Device
from quire.compute.models.decoder import Decoder
from quire.compute.runner.batch_builder import FlatBatch
from quire.compute.runner.expanded_spans import ExpandedSpans, expanded_spans
from quire.compute.runner.pool import KVPool, PagedContext, plan_attention
from quire.compute.runner.step import States, Step
from quire.compute.runner.tables import SlotTables


def sent(device: Device, tables: SlotTables, step: Step) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Of all rows: token ids, positions, and for each group of layers where keys and values go. The tables on the
    device learn what they lack."""
    batch = step.batch
    cache_locs = tables.cache_locs(batch.row_slots, batch.places)
    tables.write(step.writes)
    if step.guesses is not None:
        tables.set_tokens(step.guesses.at, step.guesses.found)
    lines = [batch.row_slots, batch.row_positions, batch.places]
    slots, positions, places, *locs = device.upload(np.concatenate([lines, cache_locs]))
    return tables.tokens[slots, places], positions, locs


class EagerForward:
    """`Forward` by the model's own data flow. Takes every step."""

    def __init__(self, device: Device, model: Decoder, pool: KVPool, tables: SlotTables, max_rows: int) -> None:
        """max_rows: of a step."""
        self._device, self._model, self._pool, self._tables = device, model, pool, tables
        self._max_rows = max_rows
        lined = [spec.mixer for spec in model.arch.layers if spec.mixer.kv_spec and spec.mixer.kv_spec.value_in_key]
        self._lined = lined[0] if lined else None
        """A mixer that keeps lines."""

    def stage(self, _: Step) -> None:
        """It has little to do on the host."""

    def _expanded(self, batch: FlatBatch) -> ExpandedSpans | None:
        if self._lined is None:
            return None
        return expanded_spans(batch, self._lined, self._tables, self._device, self._max_rows)

    def run(self, step: Step) -> States:
        """States of all rows where they are wanted, else of the sampled ones: the last layer ends with these."""
        batch = step.batch
        token_ids, positions, locs = sent(self._device, self._tables, step)
        apart = self._expanded(batch)
        q_indptr = batch.q_indptr if apart is None else apart.q_indptr
        attn_plans = plan_attention(
            self._pool, self._tables, batch.kv_lens, batch.span_slots, q_indptr, shared=step.shared,
            trees=None if batch.trees is None else batch.trees.trees,
        )  # fmt: skip
        n_rows, n_sampled = len(batch.row_slots), len(batch.sampled_rows)
        sampled = self._device.upload(batch.sampled_rows) if n_sampled < n_rows else None
        states = self._pool.states
        context = PagedContext(
            self._pool, attn_plans, locs, apart, None if states is None else states.spans(batch, step.plan.saves)
        )
        wanted = None if n_sampled == 0 or step.wants_all or step.adapters is not None else sampled
        features = self._pool.features
        visit = None if features is None else features.visit(locs[0])
        whole = features is not None and features.reads(len(self._model.layers))
        with self._model.adapted(step.adapters):
            hidden = self._model.forward(
                token_ids, positions, self._pool.around(context), wanted, visit=visit, visits_last=whole
            )
        return States(hidden, has_all=sampled is not None and wanted is None, sampled=sampled)
