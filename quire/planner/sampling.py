"""What choosing a token of a row takes on a GPU beside the logits. Owns the sum; its terms are those of
`kernels/sample/triton.py`, which a test compares.
"""

from __future__ import annotations

from typing import Final

INT32_BYTES: Final = 4
FLOAT32_BYTES: Final = 4
GROUP: Final = 128
"""Columns of which the largest logit and the sum of weights are kept."""
SPAN: Final = 4096
"""Columns of which a wide row has sums."""
LISTED: Final = 1024
"""Logits that may matter, of a row that keeps a part of the vocabulary: the shorter list."""
MOST_LISTED: Final = 8192
"""The longer list, of a wide row."""
N_KINDS: Final = 2
N_MARKS: Final = 4


def row_bytes(vocab_size: int, itemsize: int) -> int:
    """Bytes a row. itemsize: of a logit as it comes."""
    n_groups = _power_of_2(-(-vocab_size // GROUP))
    n_bytes = 2 * n_groups * FLOAT32_BYTES + LISTED * itemsize + (LISTED + n_groups) * INT32_BYTES
    n_bytes += N_KINDS * INT32_BYTES + N_MARKS * FLOAT32_BYTES
    if vocab_size > LISTED:
        n_listed = min(MOST_LISTED, _power_of_2(vocab_size))
        n_bytes += 2 * -(-vocab_size // SPAN) * FLOAT32_BYTES
        n_bytes += n_listed * (FLOAT32_BYTES + INT32_BYTES) + n_groups * 2 * INT32_BYTES
    return n_bytes


def _power_of_2(n: int) -> int:
    """The next one that is not below n, which is at least 1."""
    return 1 << (n - 1).bit_length()
