"""Which drafter `--speculative-config` names."""

from __future__ import annotations

from quire.compute.draft.drafter import Drafter, EachSequence
from quire.compute.draft.ngram import NgramDrafter
from quire.config.speculative import SpeculativeConfig


def drafter_of(config: SpeculativeConfig) -> Drafter | None:
    """A new one, which knows nothing yet; None for one that the worker makes of a model (`small.py`)."""
    if config.method == "draft_model":
        return None
    return EachSequence(NgramDrafter(*config.lookup))
