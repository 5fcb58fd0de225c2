"""Which drafter `--speculative-config` names."""

from __future__ import annotations

import functools

from quire.compute.draft.drafter import Drafter, EachSequence
from quire.compute.draft.ngram import NgramDrafter
from quire.compute.draft.suffix import SuffixDrafter
from quire.config.speculative import WITH_MODEL, SpeculativeConfig


def drafter_of(config: SpeculativeConfig) -> Drafter | None:
    """A new one, which knows nothing yet; None for one that the worker makes of weights (`loaded.py`)."""
    if config.method in WITH_MODEL:
        return None
    if config.method == "ngram":
        return EachSequence(NgramDrafter(*config.lookup))
    drafter = SuffixDrafter(
        max_tree_depth=config.suffix_decoding_max_tree_depth,
        max_bytes=config.suffix_decoding_max_memory,
        max_spec_factor=config.suffix_decoding_max_spec_factor,
        min_token_prob=config.suffix_decoding_min_token_prob,
    )
    tree = config.tree
    if tree is None:
        return EachSequence(drafter)
    return EachSequence(drafter, functools.partial(drafter.branch, most_children=tree.branching))
