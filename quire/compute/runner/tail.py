"""The end of a step, whichever way its states were computed: logits, tokens, logprobs, prompt logprobs and vectors.

Owns what open slots want of their states, and the way to the host. Does not own the states (`compute/forward`) nor how
a token is chosen (`compute/sample`).
Invariant: nothing here waits for the device; `Fetched.read` and `PooledRows.read` take what has arrived.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np
import torch

from quire.compute.device.device import Device, Download
from quire.compute.models.decoder import Decoder
from quire.compute.runner.step import States, Step
from quire.compute.runner.tables import SlotTables
from quire.compute.sample.logprobs import LogprobTensors, packed_logprobs, prompt_logprobs, token_logprobs
from quire.compute.sample.sampler import FAULT_CODES, ChoiceKind, Sampled, Sampler
from quire.core.logprobs import PackedLogprobs, TokenLogprobs
from quire.core.plan import SlotOpen, StepMasks, StepPlan
from quire.core.request import Pooling
from quire.core.result import Fault
from quire.kernels.fused_step import FusedStep
from quire.kernels.qgemm.cpu import WIDEN
from quire.kernels.sample import NON_FINITE, Choice, TokenMasks

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
class Read:
    """What was made of a step's states before any token is chosen."""

    states: States
    logits: torch.Tensor | None
    """[m, vocab_size] of the sampled rows, float32 or the model's type; None where the strategy chooses."""
    prompt: list[PromptRows]
    pooled: PooledRows | None


@dataclasses.dataclass(slots=True)
class Fetched:
    """Logprob tensors that come along with the tokens."""

    sampled: LogprobTensors | None
    prompt: list[PromptRows]

    def tensors(self) -> list[torch.Tensor]:
        """What is to be downloaded, in a fixed order."""
        return [part.cells for part in self._parts()]

    def read(self, arrived: list[torch.Tensor]) -> tuple[dict[int, PackedLogprobs], dict[int, list[TokenLogprobs]]]:
        """Rows by sampled row, and rows by span, from the downloaded tensors."""
        given = list(arrived)
        sampled: dict[int, PackedLogprobs] = {}
        if self.sampled is not None:
            sampled = packed_logprobs(self.sampled.rows, self.sampled.n_top, given.pop(0))
        prompt: dict[int, list[TokenLogprobs]] = {}
        for of_span in self.prompt:
            prompt[of_span.span] = [row for part in of_span.parts for row in token_logprobs(part.n_top, given.pop(0))]
        return sampled, prompt

    def _parts(self) -> list[LogprobTensors]:
        return ([self.sampled] if self.sampled is not None else []) + [
            part for rows in self.prompt for part in rows.parts
        ]


class Tail:
    """The end of every step of one model on one device.

    `read`, then `choose`: any rows. `captured`: rows that have a `kind`, as a strategy captures it. `record`: the
    logits, as a strategy has them in one native call.
    """

    def __init__(self, device: Device, model: Decoder, tables: SlotTables, sampler: Sampler) -> None:
        self._device, self._model, self._tables, self._sampler = device, model, tables, sampler
        self.vocab_limit = sampler.vocab_limit
        """Logits from there on are padding."""
        self.opened: dict[int, SlotOpen] = {}
        """Open slots."""
        self._with_prompt: set[int] = set()
        """Of these, those that want logprobs of their prompt, or its states."""

    def open(self, opened: SlotOpen) -> None:
        """A sequence gets a slot."""
        self._sampler.open(opened)
        self.opened[opened.slot] = opened
        if opened.params.prompt_logprobs >= 0 or opened.params.pooling is not None:
            self._with_prompt.add(opened.slot)

    def close(self, slot: int) -> None:
        """The slot is free, if it was not already: the step that was to open it may have failed."""
        self._sampler.close(slot)
        self.opened.pop(slot, None)
        self._with_prompt.discard(slot)

    def wants_all(self, plan: StepPlan) -> bool:
        """Whether rows are wanted besides those that tokens are sampled from."""
        return not self._with_prompt.isdisjoint(plan.spans.slots)

    def reads_tokens(self, slot: int) -> bool:
        """Whether tokens of the sequence are chosen by those before them, other than through the model."""
        return self._sampler.reads_tokens(slot)

    def kind(self, step: Step) -> ChoiceKind | None:
        """Of the captured choice that all sampled rows can have; None: some want more."""
        batch = step.batch
        return self._sampler.kind(batch.sampled_slots, batch.sampled_positions, masked=bool(step.plan.masked))

    def controls(self, step: Step) -> np.ndarray:
        """float64 [N_CONTROLS, m] of the sampled rows."""
        return self._sampler.controls(step.batch.sampled_slots, step.batch.sampled_positions)

    def histories(self, step: Step, out: np.ndarray) -> None:
        """Into `out`, float64 [N_HISTORY, m]: what `captured` is told of the sampled rows if their kind changes
        logits."""
        self._sampler.histories(step.batch.sampled_slots, step.batch.sampled_positions, out)

    def is_plain(self, step: Step, positions: np.ndarray) -> bool:
        """Whether tokens of the step that stand at these positions or later depend on logits and `controls` alone, and
        nothing else is wanted of them."""
        return self._sampler.is_plain(step.batch.sampled_slots, positions)

    def keys(self, slots: np.ndarray) -> np.ndarray:
        """int64 [m]: on which, with positions, the random numbers of slots depend."""
        return self._sampler.keys(slots)

    def native_controls(self, step: Step) -> np.ndarray | None:
        """As `controls`, where a native call can choose the tokens: none is masked, and no vocabulary cut."""
        slots, positions = step.batch.sampled_slots, step.batch.sampled_positions
        if step.plan.masked or not self._sampler.is_plain(slots, positions) or self._sampler.is_truncated(slots):
            return None
        return self._sampler.controls(slots, positions)

    def keep_wide(self, n_rows: int) -> None:
        """Before `captured` of a kind that changes the logits of up to so many rows: see `Sampler.keep_wide`."""
        self._sampler.keep_wide(n_rows)

    def captured(
        self,
        hidden: torch.Tensor,
        rows: torch.Tensor,
        where: tuple[torch.Tensor, torch.Tensor],
        controls: torch.Tensor,
        masks: TokenMasks,
        logits: torch.Tensor,
        choice: Choice,
        kind: ChoiceKind,
        histories: torch.Tensor,
    ) -> torch.Tensor | None:
        """Logits, choice and new tokens of `rows` int64 [m] of `hidden`, all at fixed addresses: it can be captured.

        where: (slots, positions) int64 [m] of the new tokens; logits [m, vocab] and choice [m] take the results; the
        others, and what is returned, as in `Sampler.choose_captured`.
        """
        self._model.logits(hidden[rows], out=logits)
        sampler, tokens = self._sampler, self._tables.tokens
        found = sampler.choose_captured(logits, controls, choice, masks, kind, histories, tokens)
        tokens[where] = choice.token_ids
        return found

    def sampled(self, step: Step, choice: Choice, cells: torch.Tensor | None) -> Sampled:
        """What was chosen of the sampled rows by a captured choice, from the first rows of what it returned."""
        slots = step.batch.sampled_slots
        n, logprobs = len(slots), None
        if cells is not None:
            logprobs = LogprobTensors(np.arange(n), self._sampler.asked(slots), cells[:n])
        return Sampled(choice.token_ids[:n], choice.status[:n], logprobs)

    def record(self, fused: FusedStep, hidden: torch.Tensor, logits: torch.Tensor) -> None:
        """Logits of the rows of `hidden` as the last operation of `fused`, for a plain model (`Decoder.is_plain`)."""
        self._model.head.record(fused, hidden, logits, norm=self._model.norm.pair, then=WIDEN)

    def read(self, step: Step, states: States) -> Read:
        """Queue everything that does not depend on masks, but for the choice."""
        prompt, pooled = self._prompt_logprobs(step, states.hidden), self._pooled(step, states.hidden)
        logits = states.logits
        if logits is None and states.choose is None:
            logits = self._logits(step, states)
        return Read(states, logits, prompt, pooled)

    @torch.inference_mode()
    def choose(
        self, step: Step, read: Read, masks: StepMasks | None, then: Callable[[Sampled], None] | None = None
    ) -> tuple[Fetched, Download]:
        """Queue the choice of tokens, and start the copy to the host: ids, status, logprobs, and the pooled rows. then:
        told of the choice before that copy."""
        bits = None if masks is None else np.frombuffer(masks.bits, "<i4").reshape(step.batch.n_masks, -1)
        if read.states.choose is not None:
            sampled = read.states.choose(bits)
        else:
            assert read.logits is not None
            sampled = self._sample(step, read.logits, bits)
        if then is not None:
            then(sampled)
        fetched = Fetched(sampled.logprobs, read.prompt)
        states = [] if read.pooled is None else [read.pooled.states]
        return fetched, self._device.download([sampled.token_ids, sampled.status, *fetched.tensors(), *states])

    def _logits(self, step: Step, states: States) -> torch.Tensor:
        hidden = states.hidden
        if states.has_all:
            rows = self._device.upload(step.batch.sampled_rows) if states.sampled is None else states.sampled
            hidden = hidden[rows]
        return self._logits_of(hidden)

    def _logits_of(self, hidden: torch.Tensor) -> torch.Tensor:
        # kernels of a GPU read the model's type: half of float32's bytes; the values are the same
        dtype = self._model.dtype if hidden.is_cuda else torch.float32
        logits = torch.empty((len(hidden), self._model.arch.vocab_size), dtype=dtype, device=hidden.device)
        return self._model.logits(hidden, out=logits) if len(hidden) else logits

    def _sample(self, step: Step, logits: torch.Tensor, bits: np.ndarray | None) -> Sampled:
        batch, tokens, upload = step.batch, self._tables.tokens, self._device.upload
        masks = None if bits is None else TokenMasks(upload(batch.mask_lines), upload(bits))
        sampled = self._sampler.sample(logits, batch.sampled_slots, batch.sampled_positions, tokens, masks)
        where = upload(np.stack([batch.sampled_slots, batch.sampled_positions]))
        tokens[where[0], where[1]] = sampled.token_ids
        return sampled

    def _pooled(self, step: Step, hidden: torch.Tensor) -> PooledRows | None:
        if not step.wants_all:
            return None
        spans, columns = [], step.plan.spans
        parts = []
        for span, slot in enumerate(columns.slots):
            opened = self.opened[slot]
            end = columns.starts[span] + columns.lengths[span]
            rows = hidden[step.batch.q_indptr[span] : step.batch.q_indptr[span + 1]]
            if opened.params.pooling is Pooling.MEAN:
                parts.append(self._model.states(rows).sum(0))
            elif opened.params.pooling is Pooling.LAST and end == opened.prompt_len:
                parts.append(self._model.states(rows[-1:])[0])
            else:
                continue
            spans.append(span)
        return PooledRows(spans, torch.stack(parts)) if spans else None

    def _prompt_logprobs(self, step: Step, hidden: torch.Tensor) -> list[PromptRows]:
        found: list[PromptRows] = []
        if not step.wants_all:
            return found
        columns = step.plan.spans
        for span, slot in enumerate(columns.slots):
            opened = self.opened[slot]
            start = columns.starts[span]
            n_rows = min(start + columns.lengths[span], opened.prompt_len - 1) - start
            if opened.params.prompt_logprobs < 0 or n_rows <= 0:
                continue
            first = int(step.batch.q_indptr[span])
            targets = self._tables.tokens[slot, start + 1 : start + 1 + n_rows]
            parts = []
            for at in range(0, n_rows, PROMPT_LOGPROB_ROWS):
                end = min(at + PROMPT_LOGPROB_ROWS, n_rows)
                logits = self._logits_of(hidden[first + at : first + end])
                parts.append(prompt_logprobs(logits, targets[at:end], opened.params.prompt_logprobs))
            found.append(PromptRows(span, parts))
        return found
