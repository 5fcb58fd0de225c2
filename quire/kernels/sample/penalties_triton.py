"""Penalties on CUDA in one launch: a token of a sequence is compared with all others of it.

Owns no count table: a token's first place in the sequence changes its logit, once. The work grows with the square of
the length, at 4,096 tokens 17 million comparisons a row; longer sequences count in a table (`penalties.py`).
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from quire.kernels.sample import penalties
from quire.kernels.sample.draw import LONGEST_COMPARED

BLOCK: Final = 128
"""Tokens of a program."""
STEP: Final = 64
"""Tokens that they are compared with at once."""
COLUMNS: Final = 4096
"""Logits that a program widens."""


def penalise(logits: torch.Tensor, histories: torch.Tensor, tokens: torch.Tensor, longest: int) -> None:
    """See `op.penalise`."""
    if longest > LONGEST_COMPARED:
        penalties.penalise(logits, histories, tokens, longest)
    elif longest:
        _penalise[(triton.cdiv(longest, BLOCK), histories.shape[1])](
            logits, logits.stride(0), histories, histories.stride(0), tokens, tokens.stride(0),
            BLOCK=BLOCK, STEP=STEP, num_warps=4,
        )  # fmt: skip


def widen(logits: torch.Tensor, out: torch.Tensor) -> None:
    """See `op.widen`. torch's own copy moves half as many bytes a second (lab notes, the sampler's speed)."""
    n_rows, width = logits.shape
    _widen[(triton.cdiv(width, COLUMNS), n_rows)](logits, logits.stride(0), width, out, COLUMNS=COLUMNS, num_warps=4)


@triton.jit  # type: ignore[untyped-decorator]
def _widen(logits, stride, width, wide, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    row, column = tl.program_id(1).to(tl.int64), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    x = tl.load(logits + row * stride + column, mask=column < width, other=0.0)
    tl.store(wide + row * width + column, x.to(tl.float32), mask=column < width)


@triton.jit(do_not_specialize=["line"], do_not_specialize_on_alignment=["given"])  # type: ignore[untyped-decorator]
def _penalise(logits, stride, given, line, tokens, tokens_stride, BLOCK: tl.constexpr, STEP: tl.constexpr):  # type: ignore[no-untyped-def]
    """given: the histories, whose lines are `line` numbers apart."""
    block, given = tl.program_id(0), given + tl.program_id(1)
    row, slot = tl.load(given).to(tl.int64), tl.load(given + line).to(tl.int64)
    length, prompt_len = tl.load(given + 2 * line).to(tl.int32), tl.load(given + 3 * line).to(tl.int32)
    repetition, frequency = tl.load(given + 4 * line).to(tl.float32), tl.load(given + 5 * line).to(tl.float32)
    presence = tl.load(given + 6 * line).to(tl.float32)
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
