"""What ranks that hold the experts of a layer send each other there, either way, and which way a step takes.

Owns the formulas, by which the engine chooses too. Does not own the messages (`compute/dist/exchange`). Bytes are what
one rank sends in all: rows with their choices, and what experts make of them on the way back. Source: Lepikhin et al.
2021, "GShard", section 3.2, for rows that travel to their experts.
"""

from __future__ import annotations

import math
from typing import Final

CHOICE_BYTES: Final = 8
"""An expert's number and its weight."""
COUNTS_BYTES: Final = 1 << 20
"""What a dispatch takes beside its rows, as bytes: ranks tell one another how many come, and the host waits for that. A
guess: not measured on GPUs."""

LAUNCHES_BYTES: Final = 16 << 20
"""What a layer's launches take longer one by one than in a captured step, as bytes; a dispatch cannot be captured. 0.1
ms, of which a guess is made likewise."""


def gathered_bytes(n_rows: float, row_bytes: float, n_chosen: float, n_ranks: int) -> float:
    """Where every rank gets the rows of all, and what all made of them is summed where they came from. n_rows: of the
    rank that has the most, as the others are padded; row_bytes: of one, without its choices."""
    return (n_ranks - 1) * n_rows * _there_and_back(row_bytes, n_chosen)


def dispatched_bytes(n_rows: float, row_bytes: float, n_chosen: float, n_experts: int, n_ranks: int) -> float:
    """Where a row goes once to each rank that holds one of its experts, if experts are chosen evenly. n_rows: of the
    sending rank."""
    return n_rows * ranks_visited(round(n_chosen), n_experts, n_ranks) * _there_and_back(row_bytes, n_chosen)


def ranks_visited(n_chosen: int, n_experts: int, n_ranks: int) -> float:
    """Other ranks to which a row goes, in the mean."""
    n_held = n_experts // n_ranks
    missed = math.comb(n_experts - n_held, n_chosen) / math.comb(n_experts, n_chosen)
    return (n_ranks - 1) * (1 - missed)


def gathers(
    n_most: float,
    n_mean: float,
    row_bytes: float,
    n_chosen: float,
    n_experts: int,
    n_ranks: int,
    counts_bytes: float = COUNTS_BYTES,
) -> bool:
    """Whether a step takes fewer bytes if every rank gets all rows. n_most: rows of the rank that has the most; n_mean:
    of all in the mean. counts_bytes: see `COUNTS_BYTES`."""
    dispatched = dispatched_bytes(n_mean, row_bytes, n_chosen, n_experts, n_ranks)
    return gathered_bytes(n_most, row_bytes, n_chosen, n_ranks) <= dispatched + counts_bytes


def may_be_common(n_rows: float, row_bytes: float, n_chosen: float, n_experts: int, n_ranks: int) -> bool:
    """Whether a captured step in which each rank has so many rows, all gathered, is quicker than one that dispatches
    them, launched kernel by kernel."""
    return gathers(n_rows, n_rows, row_bytes, n_chosen, n_experts, n_ranks, LAUNCHES_BYTES)


def _there_and_back(row_bytes: float, n_chosen: float) -> float:
    return 2 * row_bytes + CHOICE_BYTES * n_chosen
