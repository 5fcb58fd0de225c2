"""What users get back: `RequestOutput` and its parts, names and shapes as vLLM users know them."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(slots=True)
class Logprob:
    """Natural-log probability of one token at one position."""

    logprob: float
    rank: int | None = None
    """1 = the most probable."""
    decoded_token: str | None = None


@dataclasses.dataclass(slots=True)
class CompletionOutput:
    """One of the `n` completions of a request."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    """One dict a token: token id → Logprob, the chosen token first."""
    finish_reason: str | None = None
    """'stop', 'length', 'abort' or 'error'; None while it runs."""
    stop_reason: int | str | None = None
    """The stop token id or stop string that ended it; None for the model's end token or the length limit."""

    def finished(self) -> bool:
        """True once nothing more will come."""
        return self.finish_reason is not None


@dataclasses.dataclass(slots=True)
class RequestMetrics:
    """Times in seconds on the engine's monotonic clock."""

    arrival_s: float = 0.0
    first_token_s: float | None = None
    finished_s: float | None = None
    queued_s: float = 0.0
    """How long it waited for its first slot, if the engine says so."""


@dataclasses.dataclass(slots=True)
class RequestOutput:
    """The state of a request: its prompt and its completions, in index order."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """One entry a prompt token, the first is None."""
    pooled: list[float] | None = None
    """[hidden_size]: the vector of the prompt, not normalised, when it was asked for instead of tokens."""
    num_cached_tokens: int = 0
    metrics: RequestMetrics = dataclasses.field(default_factory=RequestMetrics)
