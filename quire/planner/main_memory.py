"""How large the KV pool of an engine on a CPU is, if nobody says: its memory is everybody's."""

from __future__ import annotations

from typing import Final

from quire.planner.memory import MemoryEquation

MAIN_SHARE: Final = 0.25
"""Of what is free."""


def main_pool_bytes(terms: MemoryEquation, free_bytes: int, *, is_length_asked: bool) -> int:
    """Bytes of the pool: a share of what is free, and at least one sequence of a length that was asked for, its prompt
    in whole steps, but not more than all slots at full length can fill."""
    prompt_pages = terms.prompt_pages(terms.max_model_len)  # sequences share the tokens of steps
    useful_pages = 1 + (terms.max_num_seqs - 1) * terms.seq_pages(terms.max_model_len) + prompt_pages
    asked_bytes = (1 + prompt_pages) * terms.page_bytes if is_length_asked else 0
    pool_bytes = max(int(free_bytes * MAIN_SHARE), min(asked_bytes, free_bytes))
    return min(pool_bytes, useful_pages * terms.page_bytes)
