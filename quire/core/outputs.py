"""What users get back: `RequestOutput` and its parts, names and shapes as vLLM users know them."""

from __future__ import annotations

import dataclasses
from typing import Any, Generic, TypeVar

from quire.core.failure import Failure
from quire.core.logprobs import Logprob, LogprobRows

__all__ = ["CompletionOutput", "Logprob", "LogprobRows", "RequestMetrics", "RequestOutput"]


@dataclasses.dataclass(slots=True)
class CompletionOutput:
    """One of the `n` completions of a request."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: LogprobRows | None = None
    """One dict a token: token id → Logprob, the chosen token first. Each is made when it is looked at."""
    finish_reason: str | None = None
    """'stop', 'length', 'abort' or 'error'; None while it runs."""
    stop_reason: int | str | None = None
    """The stop token id or stop string that ended it; None for the model's end token or the length limit."""
    failure: Failure | None = None
    """What went wrong, when finish_reason is 'error'."""

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
    prompt_logprobs: LogprobRows | None = None
    """One entry a prompt token, the first is None."""
    pooled: list[float] | None = None
    """[hidden_size]: the vector of the prompt, not normalised, when it was asked for instead of tokens."""
    num_cached_tokens: int = 0
    metrics: RequestMetrics = dataclasses.field(default_factory=RequestMetrics)


Vectors = TypeVar("Vectors")


@dataclasses.dataclass(slots=True)
class PoolingParams:
    """How `LLM.embed` and `encode` make a vector, by vLLM's names."""

    dimensions: int | None = None
    """Keep so many of the first numbers; None keeps all. For models that were trained so."""
    use_activation: bool | None = None
    """False leaves the vector as long as it is; None and True divide it by its length."""


@dataclasses.dataclass(slots=True)
class PoolingOutput:
    """The vector of a prompt as a tensor."""

    data: Any
    """torch.Tensor [hidden_size], float32."""


@dataclasses.dataclass(slots=True)
class EmbeddingOutput:
    """The vector of a prompt."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """How many numbers the vector has."""
        return len(self.embedding)


@dataclasses.dataclass(slots=True)
class ScoringOutput:
    """How alike two texts are."""

    score: float
    """The cosine of their vectors, -1 to 1."""


@dataclasses.dataclass(slots=True)
class PoolingRequestOutput(Generic[Vectors]):
    """What became of one prompt that asked for a vector."""

    request_id: str
    outputs: Vectors
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True
    pooled: list[float] = dataclasses.field(default_factory=list)
    """[hidden_size]: the vector as the model gives it, neither cut nor divided by its length."""


EmbeddingRequestOutput = PoolingRequestOutput[EmbeddingOutput]
ScoringRequestOutput = PoolingRequestOutput[ScoringOutput]


@dataclasses.dataclass(slots=True)
class Metric:
    """A number of the engine, by the name that /metrics has for it."""

    name: str
    labels: dict[str, str]


@dataclasses.dataclass(slots=True)
class Counter(Metric):
    """A number that only grows."""

    value: int


@dataclasses.dataclass(slots=True)
class Gauge(Metric):
    """A number as it is now."""

    value: float
