"""Sizes of decode steps that a GPU engine captures: a step is padded to the next one. Owns the list alone."""

from __future__ import annotations

import bisect
import functools


@functools.cache
def decode_sizes(largest: int) -> list[int]:
    """1, 2, 4, 8, then every 8 to 64, every 16 to 256, every 32 to 512, every 64 up to `largest`, always among them."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 512, 32), *range(512, largest + 1, 64)]
    return sorted({size for size in sizes if size < largest} | {largest})


def padded_rows(n_rows: int, largest: int) -> int:
    """Rows of the captured step that holds so many decodes; `n_rows` where none is large enough."""
    sizes = decode_sizes(largest)
    at = bisect.bisect_left(sizes, n_rows)
    return sizes[at] if at < len(sizes) else n_rows
