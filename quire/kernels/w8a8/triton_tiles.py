"""How products of 8 bits are cut for Triton. Plain arithmetic, no torch.

Invariant: shapes alone decide, so that the same shapes give the same bits and a captured graph stays valid.
"""

from __future__ import annotations

from typing import Final

COLUMNS: Final = 128
"""Of a tile: where weights have a scale a block, those of one block."""
N_TILES: Final = 128
"""Where fewer tiles would cover the result they are made narrower: a GPU has about as many processors."""


def tile(m: int, n: int, rows_alone: bool, *, is_int: bool) -> tuple[int, int, int]:
    """Rows of x, rows of the weight and columns of both that are multiplied at once.

    rows_alone: what a row gets must not depend on m. is_int: sums are exact, so the order of columns is free.
    """
    if rows_alone:
        return 64, 64, COLUMNS
    bm = min(128, max(16, 1 << max(0, m - 1).bit_length()))
    bn = 64 if bm < 128 else 128
    while bn > 32 and -(-m // bm) * -(-n // bn) < N_TILES:
        bn //= 2
    return bm, bn, 2 * COLUMNS if is_int and bm <= 32 and bn == 32 else COLUMNS
