"""Which drafter `--speculative-config` names."""

from __future__ import annotations

from quire.compute.draft.drafter import Drafter, EachSequence
from quire.compute.draft.ngram import NgramDrafter
from quire.config.speculative import SpeculativeConfig


def drafter_of(config: SpeculativeConfig) -> Drafter:
    """A new one, which knows nothing yet."""
    return EachSequence(NgramDrafter(*config.lookup))
