"""Beam search: what a user may ask of it, what comes back, and what the engine is told.

Owns the public `BeamSearchParams`, `BeamSearchSequence` and `BeamSearchOutput` (vLLM's names) and their checks.
Does not own the search (`control/beam_search.py`).
Invariant: checked when made; one that passed can be served if the model has enough logits.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from quire.core.field_checks import FieldChecks
from quire.core.logprobs import LogprobRows
from quire.core.sampling import MAX_INT32, SamplingParams, Temperature
from quire.core.spelling import NamedArguments

MAX_WIDTH: Final = 64
"""Each beam reports (1 + end tokens) * width candidates a step."""
MAX_PENALTY: Final = 10

EarlyStopping = bool | Literal["never"]


class BeamTerms(msgspec.Struct, frozen=True, array_like=True):
    """What the engine needs to know of a search. `Request.params.n` is the number of beams that come back."""

    width: int
    """Beams that live at once."""
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False

    def n_candidates(self, n_end_tokens: int) -> int:
        """Next tokens that each beam reports: so many leave `width` beams even if the best of each one end."""
        return max(2, 1 + n_end_tokens) * self.width


class BeamSearchParams(
    msgspec.Struct, metaclass=NamedArguments, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """Parameters of a beam search: fields and defaults as in vLLM, and `early_stopping` as in transformers.

    The search is that of `transformers.generate(num_beams=beam_width, do_sample=False)`. InvalidParameter names a
    field whose value is not allowed.
    """

    beam_width: Annotated[int, Meta(ge=1, le=MAX_WIDTH, description="Beams that live at once, and that come back.")]
    max_tokens: Annotated[int, Meta(ge=1, le=MAX_INT32, description="Longest output in tokens.")]
    ignore_eos: Annotated[bool, Meta(description="Go on after the model's end token.")] = False
    temperature: Annotated[
        Temperature,
        Meta(description="Changes nothing: beams are ranked by the model's own log-probabilities, as in vLLM."),
    ] = 0.0
    length_penalty: Annotated[
        float,
        Meta(
            ge=-MAX_PENALTY,
            le=MAX_PENALTY,
            description="Beams are ranked by their log-probability / length ** length_penalty.",
        ),
    ] = 1.0
    include_stop_str_in_output: Annotated[bool, Meta(description="Keep the end token of a beam.")] = False
    early_stopping: Annotated[
        EarlyStopping,
        Meta(
            description="True: end when `beam_width` beams have ended. False: when the best living one, at its length,"
            " is no better than the worst of them. 'never': when none can become better at any length."
        ),
    ] = False

    def __post_init__(self) -> None:
        CHECKS.run(self)

    def terms(self) -> BeamTerms:
        """For the engine."""
        return BeamTerms(self.beam_width, self.length_penalty, self.early_stopping)

    def sampling(self) -> SamplingParams:
        """What there is besides the search."""
        return SamplingParams(
            n=self.beam_width, temperature=0.0, max_tokens=self.max_tokens, ignore_eos=self.ignore_eos, logprobs=0,
            include_stop_str_in_output=self.include_stop_str_in_output,
        )  # fmt: skip


CHECKS: Final = FieldChecks(BeamSearchParams)
"""Of single fields."""


@dataclasses.dataclass(slots=True)
class BeamSearchSequence:
    """One beam."""

    tokens: list[int]
    """Prompt and output; without the end token unless `include_stop_str_in_output`."""
    logprobs: LogprobRows | list[dict[int, object]]
    """One dict an output token, the end token's included."""
    cum_logprob: float = 0.0
    """Of the output, its end token included; not divided by its length."""
    text: str | None = None
    """Of prompt and output, as in vLLM; None without a tokenizer."""
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclasses.dataclass(slots=True)
class BeamSearchOutput:
    """The beams of one prompt, the best first."""

    sequences: list[BeamSearchSequence]
