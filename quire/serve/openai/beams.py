"""`use_beam_search` of completions and chat: from a body's fields to the terms of a search.

Owns what these fields mean together, as vLLM has it: `best_of`, or else `n`, is the number of beams, and the `n` best
come back. Does not own the checks of their values (`core/beams.py`) nor of what a search cannot do (`InputProcessor`).
Invariant: what would have changed a sampled answer and has no meaning for a search is noted as ignored.
"""

from __future__ import annotations

import dataclasses
from typing import Final

from quire.core.beams import BeamSearchParams, BeamTerms
from quire.core.errors import InvalidParameter
from quire.serve.http.ignored import IgnoredParams
from quire.serve.openai.schema import SamplingFields
from quire.serve.openai.validation import RequestLimits

SAMPLED: Final = ("temperature", "top_p", "top_k", "min_p", "seed")
"""How a token is drawn: a search draws none."""


def beam_terms(
    body: SamplingFields, ignored: IgnoredParams, limits: RequestLimits, best_of: int | None = None
) -> tuple[BeamTerms | None, RequestLimits]:
    """What a search is told, None without `use_beam_search`, and the limits for the other parameters. InvalidParameter
    for a value that is not allowed."""
    if not body.use_beam_search:
        if body.length_penalty not in (None, 1):
            raise InvalidParameter("length_penalty", body.length_penalty, "1 without use_beam_search")
        if body.early_stopping:
            ignored.note("early_stopping")
        return None, limits
    for name in SAMPLED:
        if getattr(body, name):
            ignored.note(name)
    n = 1 if body.n is None else body.n
    params = BeamSearchParams(
        beam_width=n if best_of is None else best_of,
        max_tokens=1,
        length_penalty=1.0 if body.length_penalty is None else body.length_penalty,
        early_stopping=False if body.early_stopping is None else body.early_stopping,
    )
    # What the checkpoint proposes is for sampling.
    return params.terms(), dataclasses.replace(limits, defaults={})


def beam_names(body: SamplingFields, best_of: int | None = None) -> dict[str, str]:
    """Parameter of a search → the field that it came from."""
    return {"beam_width": "n" if best_of is None else "best_of"} if body.use_beam_search else {}
