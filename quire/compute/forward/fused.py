"""Steps of a decoder on the CPU as one native call: the data flow of `Decoder` as a `kernels.fused_step.FusedStep`.

Owns the memory of a step's rows, and steps that wait for their turn. Does not own weights, pages nor tables, to which
it only points: they must stay; nor what follows the states (`runner/tail`, which is recorded with them).
Invariant: a run gives the bits of `Decoder.forward` and `logits`.
"""

from __future__ import annotations

import time

import numpy as np
import torch

from quire.compute.device.device import Device
from quire.compute.layers.experts import Experts
from quire.compute.layers.fused_rows import LayerRows, expert_rows
from quire.compute.models.decoder import Decoder
from quire.compute.runner.batch_builder import FlatBatch, build_batch
from quire.compute.runner.lengths import SlotLengths
from quire.compute.runner.pool import KVPool
from quire.compute.runner.settled import Kept, Settled
from quire.compute.runner.step import States, Step
from quire.compute.runner.tables import SlotTables
from quire.compute.runner.tail import Tail
from quire.compute.sample.sampler import Sampled, split_faults
from quire.config.attention import AttentionSpec
from quire.core.plan import Spans, StepMasks, StepPlan
from quire.core.result import StepResult, StepTimings
from quire.kernels import fused_step


def step_rows(device: Device, model: Decoder, pool: KVPool, max_rows: int) -> LayerRows:
    """Memory of a step's rows. There must be no obstacle."""
    arch = model.arch
    first = arch.layers[0].mixer
    assert isinstance(first, AttentionSpec), "a plain layer has no other mixer"

    def rows(width: int) -> torch.Tensor:
        return device.zeros((max_rows, width), model.dtype)

    return LayerRows(
        rows(arch.hidden_size), rows(first.q_size + 2 * first.kv_size), rows(first.q_size), rows(arch.ffn_size),
        {layer: (pages, pool.group_of[layer]) for layer, pages in pool.pages_of.items()},
        expert_rows(arch.layers, arch.hidden_size, max_rows, model.dtype, device.zeros),
    )  # fmt: skip


def new_fused_step(model: Decoder, tables: SlotTables, *, has_adapters: bool = False) -> fused_step.FusedStep:
    """Without operations."""
    arch = model.arch
    return fused_step.FusedStep(
        tables.tokens, tables.pages, tables.page_size, arch.n_heads, arch.n_kv_heads, arch.head_dim,
        has_adapters=has_adapters,
    )  # fmt: skip


def may_adapt(model: Decoder) -> bool:
    """Whether steps of rows with adapters can be fused too: none is of experts, which take turns then."""
    of_experts = any(isinstance(layer.ffn, Experts) and layer.ffn.adapted is not None for layer in model.layers)
    return model.adapters is not None and not of_experts


class FusedForward:
    """`Forward` for steps of up to `max_rows` rows and `max_sampled` sampled ones, where no other states are wanted.
    There must be no obstacle."""

    def __init__(
        self,
        device: Device,
        model: Decoder,
        pool: KVPool,
        tables: SlotTables,
        tail: Tail,
        *,
        max_rows: int,
        max_sampled: int,
    ) -> None:
        arch, self._tail = model.arch, tail
        memory = step_rows(device, model, pool, max_rows)
        self._x = memory.x
        self._logits = device.zeros((max_sampled, arch.vocab_size), torch.float32)
        self._allowed = self._logits[:, : tail.vocab_limit]
        joined = None if pool.features is None else torch.zeros_like(self._x)
        self._fused = new_fused_step(model, tables)
        self._record(self._fused, model, pool, memory, joined)
        self._adapted: fused_step.FusedStep | None = None
        """Of steps with adapters."""
        if may_adapt(model):
            self._adapted = new_fused_step(model, tables, has_adapters=True)
            self._record(self._adapted, model, pool, memory, joined)

    def _record(
        self, fused: fused_step.FusedStep, model: Decoder, pool: KVPool, memory: LayerRows, joined: torch.Tensor | None
    ) -> None:
        """joined: memory for features, where there are some."""
        fused.embed(model.embed.weight, self._x)
        features, n_layers = pool.features, len(model.layers)
        for index, layer in enumerate(model.layers):
            if features is not None and joined is not None:
                features.record(fused, index, self._x, joined)
            ends = index == n_layers - 1 and (features is None or not features.reads(n_layers))
            layer.record(fused, memory, is_last=ends)
        if features is not None and joined is not None and features.reads(n_layers):
            features.record(fused, n_layers, self._x, joined)
            fused.take(self._x)
        self._tail.record(fused, self._x, self._logits)

    def stage(self, _: Step) -> None:
        """A host computes when it is called: `ready` is what can be done before."""

    def run(self, step: Step) -> States | None:
        """The step up to its logits, and its tokens too where their choice is plain."""
        n_sampled, chosen = len(step.batch.sampled_rows), None
        if not self._fits(step):
            return None
        controls = self._tail.native_controls(step)
        if controls is None:
            self._of(step).run(*_arrays(step.batch), trees=step.batch.trees, adapters=step.adapters)
        else:
            call, token_ids, status = self._choosing(step, controls)
            call.run()
            chosen = Sampled(torch.from_numpy(token_ids), torch.from_numpy(status), None)
        return States(
            self._x[:n_sampled],
            has_all=False,
            logits=self._logits[:n_sampled],
            choose=None if chosen is None else lambda _: chosen,
        )

    def ready(self, step: Step, start_s: float) -> ReadyStep | None:
        """The step made ready before its turn, which was begun at start_s; None if more than the native call is needed.

        Steps before it may be computing: what they read and write stays as it is.
        """
        controls = self._tail.native_controls(step) if self._fits(step) else None
        if controls is None:
            return None
        return ReadyStep(step.plan, step.batch, *self._choosing(step, controls), time.perf_counter() - start_s)

    def _fits(self, step: Step) -> bool:
        is_there = step.adapters is None or self._adapted is not None
        return not step.wants_all and is_there and len(step.batch.sampled_rows) <= len(self._logits)

    def _of(self, step: Step) -> fused_step.FusedStep:
        """The operations for a step that fits."""
        return self._fused if step.adapters is None or self._adapted is None else self._adapted

    def chain(self, spans: Spans, n_places: list[int]) -> np.ndarray:
        """The best n_places[i], not rising, tokens behind each span, all of which want one: see `FusedStep.chain`."""
        return self._fused.chain(self._allowed, np.array(n_places, np.int32), *_arrays(build_batch(spans)))

    def _choosing(self, step: Step, controls: np.ndarray) -> tuple[fused_step.FusedStepCall, np.ndarray, np.ndarray]:
        """A call that runs the step; where new tokens, also in the token table, and their status are after it."""
        batch = step.batch
        return self._of(step).choosing(
            self._allowed, controls, *_arrays(batch), trees=batch.trees, adapters=step.adapters
        )


class ReadyStep:
    """A step of which nothing is left to do but its native call, and then to see which drafts count, if it has some."""

    def __init__(
        self,
        plan: StepPlan,
        batch: FlatBatch,
        call: fused_step.FusedStepCall,
        token_ids: np.ndarray,
        status: np.ndarray,
        host_s: float,
    ) -> None:
        """token_ids, status: of each sampled row, once the call is made."""
        self._plan, self._slots, self._host_s = plan, batch.sampled_slots, host_s
        self._call, self._token_ids, self._status = call, token_ids, status
        self._kept: Kept | None = None

    def compute(self) -> None:
        """Make the call, when all steps before it are computed."""
        self._call.run()

    def leave_a_core(self) -> None:
        """To other work, until `hurry`."""
        self._call.leave_a_core()

    def hurry(self) -> None:
        """No other work needs a core any more."""
        self._call.spread()

    def mask(self, masks: StepMasks | None) -> None:
        """Nothing to do: no span of a step that is made ready has a mask."""

    def keep(self, lengths: SlotLengths, settled: Settled) -> None:
        """Tell lengths, which have settled this step, what was computed, before any slot of it is closed."""
        self._kept = lengths.keep(settled, self._token_ids.tolist(), self._status.tolist())
        if self._kept.walks:
            lengths.straighten(self._kept.walks, lengths.tokens.n_opened)

    def result(self) -> StepResult:
        """What was computed, as plain values."""
        token_ids, statuses = self._token_ids.tolist(), self._status.tolist()
        if self._kept is not None:
            return self._kept.result(self._plan.step, token_ids, statuses, self._slots, StepTimings(self._host_s))
        tokens, n_new, faults = split_faults(token_ids, statuses, self._slots)
        return StepResult(self._plan.step, tokens, n_new, faults=faults, timings=StepTimings(self._host_s))


def _arrays(batch: FlatBatch) -> tuple[np.ndarray, ...]:
    """A batch as `kernels.fused_step.FusedStep.run` takes it."""
    return (
        batch.row_slots, batch.row_positions, batch.q_indptr, batch.kv_lens, batch.span_slots, batch.sampled_rows
    )  # fmt: skip
