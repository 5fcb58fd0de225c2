"""The seam, upwards: what one step produced. Plain values."""

from __future__ import annotations

import msgspec

from quire.core.failure import Code
from quire.core.logprobs import PackedLogprobs, TokenLogprobs


class Fault(msgspec.Struct, array_like=True):
    """Compute could not produce a token for a slot; its neighbours are fine."""

    slot: int
    code: Code
    """`NON_FINITE_LOGITS`, `EMPTY_MASK`, ..."""


class StepTimings(msgspec.Struct, array_like=True):
    """Seconds spent in one step."""

    host_s: float = 0.0
    """Input preparation and launches."""
    total_s: float = 0.0
    """From launch to result on the host."""
    ended_s: float = 0.0
    """When the host knew that it was computed, by `time.monotonic`; 0: not before its result was asked for."""


class StepResult(msgspec.Struct):
    """Answer to the `StepPlan` with the same `step`."""

    step: int
    tokens: list[int] = []
    """Flat: for each span with `wants`, in span order, its `n_new` tokens."""
    n_new: list[int] = []
    """Tokens gained by each span with `wants`: 1, or 1 + accepted drafts; 0 if the slot is in `faults`."""
    n_drafted: list[int] = []
    """For each span with `n_drafts`, in span order: drafts that were made, and verified."""
    logprobs: dict[int, PackedLogprobs] = {}
    """Index into `tokens` → one row, for slots that asked."""
    prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
    """Index of a span → rows for the tokens at start+1 .. start+length that belong to the prompt."""
    pooled: dict[int, list[float]] = {}
    """Index of a span whose slot has `pooling` → [hidden_size]: MEAN, the sum of its tokens' states; LAST, the state of
    the prompt's last token, for the span that has it."""
    faults: list[Fault] = []
    timings: StepTimings = msgspec.field(default_factory=StepTimings)
