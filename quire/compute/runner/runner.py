"""Executes `StepPlan`s: apply what changed, run the flat batch through the model, sample, start the copy to the host.

Owns the order of these within a step. Does not own which tokens run (`control`) nor kernels.
Invariant: `launch` never waits for the device; only `LaunchedStep.result` does.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time

import msgspec
import numpy as np
import torch

from quire.compute.device.device import Device, Download
from quire.compute.models.decoder import Decoder
from quire.compute.runner.batch_builder import FlatBatch, build_batch, shared_spans
from quire.compute.runner.fused_step import FusedDecoder, ReadyStep
from quire.compute.runner.graphs import ForwardGraphs, GraphRunner
from quire.compute.runner.pool import KVPool, PagedContext, plan_attention
from quire.compute.runner.tables import PageWrites, SlotTables
from quire.compute.sample.logprobs import LogprobTensors, prompt_logprobs, token_logprobs
from quire.compute.sample.sampler import FAULT_CODES, Sampled, Sampler, split_faults
from quire.core.errors import EngineError
from quire.core.plan import SlotOpen, SlotParams, Spans, StepMasks, StepPlan
from quire.core.request import Pooling
from quire.core.result import Fault, StepResult, StepTimings, TokenLogprobs
from quire.kernels.attention.plan import SharedPrefix
from quire.kernels.attention.tiles import small_rows_of
from quire.kernels.sample import NON_FINITE, TokenMasks

PROMPT_LOGPROB_ROWS = 256
"""Rows whose logits are held at once while prompt logprobs are computed."""


@dataclasses.dataclass(slots=True)
class PromptRows:
    """Prompt logprobs of one span, on their way to the host."""

    span: int
    parts: list[LogprobTensors]


@dataclasses.dataclass(slots=True)
class PooledRows:
    """What spans give to the vectors of their prompts, on its way to the host."""

    spans: list[int]
    states: torch.Tensor
    """float32 [len(spans), hidden]."""

    def read(self, states: torch.Tensor, slots: list[int]) -> tuple[dict[int, list[float]], list[Fault]]:
        """Lines by span, and faults of the slots (by span) whose states are not finite."""
        found, faults = {}, []
        for span, line in zip(self.spans, states.tolist(), strict=True):
            if all(map(math.isfinite, line)):
                found[span] = line
            else:
                faults.append(Fault(slots[span], FAULT_CODES[NON_FINITE]))
        return found, faults


@dataclasses.dataclass(slots=True)
class Forward:
    """What the model made of a step's rows: the tokens, if they are chosen already, else the logits for that."""

    sampled: Sampled | None
    logits: torch.Tensor | None
    prompt: list[PromptRows]
    pooled: PooledRows | None
    captured: GraphRunner | None = None
    """Which graphs will choose the tokens from their own states, once there are masks."""


class LaunchedStep:
    """A step whose work is queued on the device; the choice of its tokens too, unless the plan has `masked` spans."""

    def __init__(self, runner: Runner, plan: StepPlan, batch: FlatBatch, forward: Forward, start_s: float) -> None:
        self._runner = runner
        self._plan = plan
        self._batch = batch
        self._forward = forward
        self._start_s = start_s
        self._download: Download | None = None
        self._host_s = time.perf_counter() - start_s

    def mask(self, masks: StepMasks | None) -> None:
        """Queue the rest: the choice, if it is not made yet, under these masks, and the copy to the host."""
        start_s = time.perf_counter()
        self._fetched, self._download = self._runner.choose(self._plan, self._batch, self._forward, masks)
        self._host_s += time.perf_counter() - start_s

    def result(self) -> StepResult:
        """Wait for the device, then turn its tensors into plain values."""
        if self._download is None:
            raise EngineError(f"step {self._plan.step} has no masks yet")
        token_ids, status, *rest = self._download.wait()
        pooled: dict[int, list[float]] = {}
        faults: list[Fault] = []
        if self._forward.pooled is not None:
            pooled, faults = self._forward.pooled.read(rest.pop(), self._plan.spans.slots)
        logprobs, prompt = self._fetched.read(rest)
        tokens, n_new, more_faults = split_faults(token_ids.tolist(), status.tolist(), self._batch.sampled_slots)
        kept = list(itertools.accumulate(n_new))
        return StepResult(
            step=self._plan.step,
            tokens=tokens,
            n_new=n_new,
            logprobs={kept[row] - 1: line for row, line in logprobs.items() if n_new[row]},
            prompt_logprobs=prompt,
            pooled=pooled,
            faults=faults + more_faults,
            timings=StepTimings(self._host_s, time.perf_counter() - self._start_s),
        )


@dataclasses.dataclass(slots=True)
class Fetched:
    """Logprob tensors that come along with the tokens."""

    sampled: LogprobTensors | None
    prompt: list[PromptRows]

    def tensors(self) -> list[torch.Tensor]:
        """What is to be downloaded, in a fixed order."""
        return [tensor for part in self._parts() for tensor in part.tensors()]

    def read(self, arrived: list[torch.Tensor]) -> tuple[dict[int, TokenLogprobs], dict[int, list[TokenLogprobs]]]:
        """Lines by sampled row, and lines by span, from the downloaded tensors."""
        n_each = len(arrived) // max(len(self._parts()), 1)
        lines = [
            token_logprobs(part.n_top, arrived[i * n_each : (i + 1) * n_each]) for i, part in enumerate(self._parts())
        ]
        sampled = {}
        if self.sampled is not None:
            sampled = dict(zip(self.sampled.rows.tolist(), lines.pop(0), strict=True))
        prompt: dict[int, list[TokenLogprobs]] = {}
        for rows in self.prompt:
            prompt[rows.span] = [line for _ in rows.parts for line in lines.pop(0)]
        return sampled, prompt

    def _parts(self) -> list[LogprobTensors]:
        return ([self.sampled] if self.sampled is not None else []) + [
            part for rows in self.prompt for part in rows.parts
        ]


class Runner:
    """One model on one device, with its KV pool, slot tables and sampler."""

    def __init__(
        self,
        device: Device,
        model: Decoder,
        pool: KVPool,
        tables: SlotTables,
        sampler: Sampler,
        graphs: GraphRunner | None = None,
        fused: FusedDecoder | None = None,
    ) -> None:
        self._device = device
        self._model = model
        self._pool = pool
        self._tables = tables
        self._sampler = sampler
        self._graphs = graphs
        self._fused = fused
        self._opened: dict[int, SlotOpen] = {}
        self._with_prompt: set[int] = set()
        """Open slots that want logprobs of their prompt, or its states."""

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Queue one step on the device."""
        start_s = time.perf_counter()
        writes = self._apply(plan)
        batch = build_batch(plan.spans, plan.masked)
        step = LaunchedStep(self, plan, batch, self._forward(plan, batch, writes), start_s)
        if not plan.masked:
            step.mask(None)
        return step

    def prepare(self, plan: StepPlan) -> ReadyStep | None:
        """All of a step that can be done before its turn; None if it must be launched in its turn.

        Steps before it may be computing, so nothing that they see may change: the plan opens and closes no slot, and
        what earlier plans open is open. New pages come behind what those steps see.
        """
        if self._fused is None or plan.masked or plan.copies or self._wants_prompt(plan):
            return None
        start_s = time.perf_counter()
        batch = build_batch(plan.spans)
        controls = self._plain_controls(plan, batch)
        if controls is None:
            return None
        self._tables.append(plan.pages)
        return ReadyStep(plan, batch, *self._fused.choosing(batch, controls), time.perf_counter() - start_s)

    def _forward(self, plan: StepPlan, batch: FlatBatch, writes: PageWrites) -> Forward:
        """By the fastest way that can run this step: one native call, captured graphs, or kernel by kernel."""
        if self._fused is not None and not self._wants_prompt(plan):
            return self._run_fused(self._fused, plan, batch)
        cache_locs = self._tables.cache_locs(batch.row_slots, batch.row_positions)
        shared = shared_spans(batch, plan.shared_prefixes, self._tables.page_size)
        if self._graphs is not None:
            # only a sequence that enters may have been given pages that this very step fills
            forwards = self._graphs.forwards_for(batch, writes, shared, is_settled=not plan.opened)
            if forwards is not None:
                return self._replay(self._graphs, forwards, plan, batch, cache_locs, writes, shared)
        return self._run(plan, batch, cache_locs, writes, shared)

    @torch.inference_mode()
    def choose(
        self, plan: StepPlan, batch: FlatBatch, forward: Forward, masks: StepMasks | None
    ) -> tuple[Fetched, Download]:
        """Queue the choice of tokens, unless it was part of the forward pass, and start the copy to the host."""
        sampled = forward.sampled
        bits = None if masks is None else np.frombuffer(masks.bits, "<i4").reshape(len(plan.masked), -1)
        if forward.captured is not None:
            choice = forward.captured.choose(batch, bits)
            sampled = Sampled(choice.token_ids, choice.status, None)
        elif sampled is None:
            if forward.logits is None:
                raise EngineError(f"step {plan.step} has neither tokens nor logits")
            sampled = self._sample(batch, forward.logits, bits)
        fetched = Fetched(sampled.logprobs, forward.prompt)
        states = [] if forward.pooled is None else [forward.pooled.states]
        return fetched, self._device.download([sampled.token_ids, sampled.status, *fetched.tensors(), *states])

    def warm_up(self, n_tokens: int) -> None:
        """Run prompts once, on the dummy page, so that kernels are compiled before the first request.

        `n_tokens`, and what attention has kernels of their own for: one token, and as many as a small tile holds. Then
        one token with a penalty: the sampler outside of captured graphs.
        """
        plain = SlotParams(0.7, 0, 1.0, 0.0, 0.0, 0.0, 1.0, 0, -1, -1, {}, None, [], [], 0)
        penalised = msgspec.structs.replace(plain, presence_penalty=0.1)
        group = self._pool.n_heads // self._pool.k.shape[2]
        lengths = sorted({1, min(max(1, small_rows_of(group) // group), n_tokens), n_tokens})
        for n, params in [*((n, plain) for n in lengths), (1, penalised)]:
            spans = Spans([0], [0], [n], [0], [True])
            self.launch(StepPlan(0, spans, n, opened=[SlotOpen(0, [0] * n, n, params)])).result()
            self._sampler.close(0)
        self._opened.clear()

    def _apply(self, plan: StepPlan) -> PageWrites:
        """Take in what changed; returns what the device's page table still lacks."""
        for slot in plan.closed:
            self._sampler.close(slot)
            self._opened.pop(slot, None)  # absent when the step that was to open it failed
            self._with_prompt.discard(slot)
        for opened in plan.opened:
            self._sampler.open(opened)
            self._opened[opened.slot] = opened
            if opened.params.prompt_logprobs >= 0 or opened.params.pooling is not None:
                self._with_prompt.add(opened.slot)
        self._tables.open(plan.opened)
        self._pool.copy(plan.copies)
        return self._tables.append(plan.pages)

    def _run_fused(self, fused: FusedDecoder, plan: StepPlan, batch: FlatBatch) -> Forward:
        """The step in one native call, with the choice of tokens where that is plain."""
        controls = self._plain_controls(plan, batch)
        if controls is None:
            return Forward(None, fused.run(batch), [], None)
        call, choice = fused.choosing(batch, controls)
        call.run()
        return Forward(Sampled(choice.token_ids, choice.status, None), None, [], None)

    def _plain_controls(self, plan: StepPlan, batch: FlatBatch) -> np.ndarray | None:
        """Controls of the sampled rows if a native call can choose their tokens, else None."""
        slots, positions = batch.sampled_slots, batch.sampled_positions
        if plan.masked or not self._sampler.is_plain(slots, positions) or self._sampler.is_truncated(slots):
            return None
        return self._sampler.controls(slots, positions)

    def _replay(
        self,
        graphs: GraphRunner,
        forwards: ForwardGraphs,
        plan: StepPlan,
        batch: FlatBatch,
        cache_locs: np.ndarray,
        writes: PageWrites,
        shared: list[SharedPrefix],
    ) -> Forward:
        """The step from captured graphs; what is not plain sampling follows kernel by kernel."""
        slots, positions = batch.sampled_slots, batch.sampled_positions
        is_plain = self._sampler.is_plain(slots, positions)
        controls = self._sampler.controls(slots, positions) if is_plain else None
        hidden = graphs.run(forwards, batch, cache_locs, writes, shared, controls)
        prompt, pooled = self._prompt_logprobs(plan, batch, hidden), self._pooled(plan, batch, hidden)
        if is_plain and plan.masked:
            return Forward(None, None, prompt, pooled, graphs)
        if is_plain:
            choice = graphs.choose(batch)
            return Forward(Sampled(choice.token_ids, choice.status, None), None, prompt, pooled)
        return Forward(None, self._logits(hidden[self._device.upload(batch.sampled_rows)]), prompt, pooled)

    def _run(
        self,
        plan: StepPlan,
        batch: FlatBatch,
        cache_locs: np.ndarray,
        writes: PageWrites,
        shared: list[SharedPrefix],
    ) -> Forward:
        """The step kernel by kernel."""
        self._tables.write(writes)
        rows = self._device.upload(np.stack([batch.row_slots, batch.row_positions, cache_locs]))
        attn_plan = plan_attention(
            self._pool, self._tables, batch.kv_lens, batch.span_slots, batch.q_indptr, shared=shared
        )
        token_ids = self._tables.tokens[rows[0], rows[1]]
        n_rows, n_sampled = len(batch.row_slots), len(batch.sampled_rows)
        wants_all = n_sampled in (0, n_rows) or self._wants_prompt(plan)
        wanted = self._device.upload(batch.sampled_rows) if n_sampled < n_rows else None
        context = PagedContext(self._pool, attn_plan, rows[2])
        hidden = self._model.forward(token_ids, rows[1], context, None if wants_all else wanted)
        prompt, pooled = self._prompt_logprobs(plan, batch, hidden), self._pooled(plan, batch, hidden)
        logits = self._logits(hidden[wanted] if wants_all and wanted is not None else hidden)
        return Forward(None, logits, prompt, pooled)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        if len(hidden) == 0:
            return hidden.new_empty((0, self._model.arch.vocab_size), dtype=torch.float32)
        return self._model.logits(hidden)

    def _sample(self, batch: FlatBatch, logits: torch.Tensor, bits: np.ndarray | None) -> Sampled:
        tokens = self._tables.tokens
        upload = self._device.upload
        masks = None if bits is None else TokenMasks(upload(batch.mask_lines), upload(bits))
        sampled = self._sampler.sample(logits, batch.sampled_slots, batch.sampled_positions, tokens, masks)
        where = self._device.upload(np.stack([batch.sampled_slots, batch.sampled_positions]))
        tokens[where[0], where[1]] = sampled.token_ids
        return sampled

    def _wants_prompt(self, plan: StepPlan) -> bool:
        """Whether rows are wanted besides those that tokens are sampled from."""
        return not self._with_prompt.isdisjoint(plan.spans.slots)

    def _pooled(self, plan: StepPlan, batch: FlatBatch, hidden: torch.Tensor) -> PooledRows | None:
        if not self._wants_prompt(plan):
            return None
        spans, parts = [], []
        for span, slot in enumerate(plan.spans.slots):
            opened = self._opened[slot]
            end = plan.spans.starts[span] + plan.spans.lengths[span]
            rows = hidden[batch.q_indptr[span] : batch.q_indptr[span + 1]]
            if opened.params.pooling is Pooling.MEAN:
                parts.append(self._model.states(rows).sum(0))
            elif opened.params.pooling is Pooling.LAST and end == opened.prompt_len:
                parts.append(self._model.states(rows[-1:])[0])
            else:
                continue
            spans.append(span)
        return PooledRows(spans, torch.stack(parts)) if spans else None

    def _prompt_logprobs(self, plan: StepPlan, batch: FlatBatch, hidden: torch.Tensor) -> list[PromptRows]:
        found: list[PromptRows] = []
        if not self._wants_prompt(plan):
            return found
        for span, slot in enumerate(plan.spans.slots):
            opened = self._opened[slot]
            start = plan.spans.starts[span]
            n_rows = min(start + plan.spans.lengths[span], opened.prompt_len - 1) - start
            if opened.params.prompt_logprobs < 0 or n_rows <= 0:
                continue
            first = int(batch.q_indptr[span])
            targets = self._tables.tokens[slot, start + 1 : start + 1 + n_rows]
            parts = []
            for at in range(0, n_rows, PROMPT_LOGPROB_ROWS):
                end = min(at + PROMPT_LOGPROB_ROWS, n_rows)
                logits = self._model.logits(hidden[first + at : first + end])
                parts.append(prompt_logprobs(logits, targets[at:end], opened.params.prompt_logprobs))
            found.append(PromptRows(span, parts))
        return found
