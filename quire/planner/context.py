"""What ranks that share the tokens of a step send each other in a layer, and the rows that they have at once.

Owns the formulas, by which the engine chooses too. Does not own the messages (`runner/ulysses`, `runner/ring_context`).
Bytes are what one rank sends in all. Sources: Jacobs et al. 2023, "DeepSpeed Ulysses", section 3.2; Yang et al. 2024,
"Context parallelism for scalable million-token inference" (arXiv 2411.01783), section 3.4: queries go round where keys
are many for each query.
"""

from __future__ import annotations

from typing import Final

LSE_BYTES: Final = 4
LEAST_ROWS: Final = {"cpu": 16, "cuda": 512}
"""Rows of a step from which on they are divided. On GPUs a round estimate, not measured: up to about 300 rows an H100
reads weights for as long as it multiplies, whoever has the rows, and two messages a layer take as long as 100 more."""


def least_rows(device: str, n_ranks: int) -> int:
    """Of a divided step on 'cpu' or 'cuda'."""
    return max(n_ranks, LEAST_ROWS[device])


def most_rows(n_tokens: int, n_ranks: int) -> int:
    """That one rank has at once of steps of up to n_tokens, whatever the device."""
    return n_tokens if n_ranks == 1 else max(-(-n_tokens // n_ranks), min(n_tokens, max(LEAST_ROWS.values())))


def ulysses_bytes(n_rows: float, row_numbers: float, out_numbers: float, itemsize: int, n_ranks: int) -> float:
    """n_rows: of one rank, all alike. row_numbers: queries, keys and values of a row that one rank's heads need;
    out_numbers: what they make of it."""
    return (n_ranks - 1) * n_rows * (row_numbers + out_numbers) * itemsize


def ring_keys_bytes(n_tokens: float, token_bytes: float, n_ranks: int) -> float:
    """Where keys and values go round. n_tokens: those of one rank that are seen; token_bytes: of one in a layer."""
    return (n_ranks - 1) * n_tokens * token_bytes


def ring_queries_bytes(
    n_rows: float, n_heads: int, head_dim: int, value_dim: int, itemsize: int, n_ranks: int
) -> float:
    """Where queries go round, and what each rank's keys make of them goes home. n_rows: of one rank."""
    return (n_ranks - 1) * n_rows * n_heads * ((head_dim + value_dim) * itemsize + LSE_BYTES)
