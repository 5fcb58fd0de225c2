"""A request as the engine sees it: tokens in, parameters, identity. Plain data, checked before it is built."""

from __future__ import annotations

import enum
from typing import Final

import msgspec

from quire.core.beams import BeamTerms
from quire.core.sampling import OutputKind, SamplingParams

MAX_SALT_CHARS: Final = 256
"""Of a `cache_salt` that a request brings."""


class Terms(msgspec.Struct, frozen=True, omit_defaults=True):
    """On what terms the server takes a request."""

    tenant: str = ""
    """Who it is for: tenants share the engine fairly. A label, never shown to others."""
    user: str = ""
    """Whom of the tenant's users it is for: they share its turns fairly. A label, and no more than that."""
    queue_limit_s: float = 0.0
    """Longest wait for its first slot; 0: any."""
    time_limit_s: float = 0.0
    """Longest time from its arrival in the engine to its last token; 0: any."""


@enum.unique
class Pooling(enum.Enum):
    """How the final normed states of a prompt become one vector."""

    LAST = "last"
    """The state of the last token, which has seen all others."""
    MEAN = "mean"
    """The mean over all tokens. Every state must be computed, so the prefix cache is not looked at."""


class Request(msgspec.Struct, kw_only=True):
    """A request to be queued. `engine/input_processor` builds it; control turns it into `params.n` sequences."""

    request_id: str
    """Unique inside the engine; made by Quire, never by the client."""
    prompt_token_ids: list[int]
    """At least one id, each below the logits width."""
    params: SamplingParams
    """Verified."""
    max_tokens: int
    """`params.max_tokens` resolved against the context: prompt + max_tokens <= max_model_len."""
    seed: int
    """The lower 63 bits of `params.seed`, or a fresh one; sequence i of `n` uses seed + i."""
    end_token_ids: list[int] = []
    """The model's end tokens, empty when `ignore_eos`."""
    bad_token_seqs: list[list[int]] = []
    """`params.bad_words` encoded: a sequence may not be completed."""
    pooling: Pooling | None = None
    """The request wants one vector of its prompt instead of tokens; n and max_tokens are 1 then."""
    beams: BeamTerms | None = None
    """The tokens are those of a beam search, of which the `params.n` best hypotheses are wanted."""
    priority: int = 0
    """Lower runs earlier under the priority policy."""
    cache_salt: str = ""
    """Prefix pages are shared only between equal salts."""
    adapter: str = ""
    """Name of the adapter that it is for; empty: the model itself."""
    content_id: str = ""
    """What that name stands for, set by the engine when it takes the request, however names change later. Set before
    that: what it must stand for."""
    terms: Terms = Terms()
    label: str = ""
    """The server's name for it, by which its history is found; empty: none is kept."""
    arrival_s: float = 0.0
    """Clock reading at arrival."""

    @property
    def is_constrained(self) -> bool:
        """True if its output must fit a grammar: no token of it is chosen without a mask."""
        return self.params.structured_outputs is not None


def pooling_params() -> SamplingParams:
    """What a request with `pooling` has as its parameters: it makes no token, and one result at its end."""
    return SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, output_kind=OutputKind.FINAL_ONLY)
