"""Penalties on CUDA in one launch: a token of a sequence is compared with all others of it.

Owns no count table: a token's first place in the sequence changes its logit, once. The work grows with the square of
the length, at 4,096 tokens 17 million comparisons a row; longer sequences count in a table (`penalties.py`).
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
import triton
import triton.language as tl

from quire.kernels.sample import penalties
from quire.kernels.transfer import upload

LONGEST: Final = 4096
BLOCK: Final = 128
"""Tokens of a program."""
STEP: Final = 64
"""Tokens that they are compared with at once."""
COLUMNS: Final = 4096
"""Logits that a program widens."""


def penalise(logits: torch.Tensor, spans: np.ndarray, strengths: np.ndarray, tokens: torch.Tensor) -> None:
    """See `op.penalise`."""
    n_rows, longest = spans.shape[1], int(spans[2].max())
    if longest > LONGEST:
        penalties.penalise(logits, spans, strengths, tokens)
        return
    given = upload(np.concatenate([spans, strengths.astype(np.float64)]), logits.device)
    if longest:
        _penalise[(triton.cdiv(longest, BLOCK), n_rows)](
            logits, logits.stride(0), given, n_rows, tokens, tokens.stride(0), BLOCK=BLOCK, STEP=STEP, num_warps=4
        )


def widen(logits: torch.Tensor) -> torch.Tensor:
    """See `op.widen`. torch's own copy moves half as many bytes a second (lab notes, the sampler's speed)."""
    n_rows, width = logits.shape
    wide = torch.empty((n_rows, width), dtype=torch.float32, device=logits.device)
    _widen[(triton.cdiv(width, COLUMNS), n_rows)](logits, logits.stride(0), width, wide, COLUMNS=COLUMNS, num_warps=4)
    return wide


@triton.jit  # type: ignore[untyped-decorator]
def _widen(logits, stride, width, wide, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    row, column = tl.program_id(1).to(tl.int64), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    x = tl.load(logits + row * stride + column, mask=column < width, other=0.0)
    tl.store(wide + row * width + column, x.to(tl.float32), mask=column < width)


@triton.jit(do_not_specialize=["n_rows"])  # type: ignore[untyped-decorator]
def _penalise(logits, stride, given, n_rows, tokens, tokens_stride, BLOCK: tl.constexpr, STEP: tl.constexpr):  # type: ignore[no-untyped-def]
    """given: float64 [7, n_rows], the lines of spans and strengths."""
    block, given = tl.program_id(0), given + tl.program_id(1)
    row, slot = tl.load(given).to(tl.int64), tl.load(given + n_rows).to(tl.int64)
    length, prompt_len = tl.load(given + 2 * n_rows).to(tl.int32), tl.load(given + 3 * n_rows).to(tl.int32)
    repetition, frequency = tl.load(given + 4 * n_rows).to(tl.float32), tl.load(given + 5 * n_rows).to(tl.float32)
    presence = tl.load(given + 6 * n_rows).to(tl.float32)
    at = block * BLOCK + tl.arange(0, BLOCK)
    start = tokens + slot * tokens_stride
    token = tl.load(start + at, mask=at < length, other=-1)
    n_before = tl.zeros([BLOCK], tl.int32)
    n_outputs = tl.zeros([BLOCK], tl.int32)
    n_compared = tl.where(block * BLOCK < length, length, 0)
    for first in range(0, n_compared, STEP):
        other_at = first + tl.arange(0, STEP)
        other = tl.load(start + other_at, mask=other_at < length, other=-2)
        same = token[:, None] == other[None, :]
        n_before += tl.sum((same & (other_at[None, :] < at[:, None])).to(tl.int32), 1)
        n_outputs += tl.sum((same & (other_at[None, :] >= prompt_len)).to(tl.int32), 1)
    is_first = (at < length) & (n_before == 0)
    place = logits + row * stride + token
    x = tl.load(place, mask=is_first, other=0.0)
    x = tl.where(x > 0, x / repetition, x * repetition)
    x = x - frequency * n_outputs - presence * (n_outputs > 0).to(tl.float32)
    tl.store(place, x, mask=is_first)
