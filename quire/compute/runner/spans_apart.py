"""Spans for attention whose rows are alone (`kernels/invariance`): each token is computed in one way, whoever asks.

A token of a prompt is always computed by the kernel for many rows, and a token behind it by the one of decode steps,
as a span of its own: also where a prompt ends with a chunk of one token, or where outputs are computed again together.
"""

from __future__ import annotations

import dataclasses
from typing import Final

import numpy as np

from quire.kernels.attention.schedule.large import INVARIANT_KEYS
from quire.kernels.attention.schedule.tiles import large_tokens_of

MOST_KEYS: Final = 1 << 20
"""Of all spans of one token, in fixed buffers."""


@dataclasses.dataclass(frozen=True, slots=True)
class ApartSpans:
    """As `kernels.attention.op.plan` takes them, in the order of the step's rows."""

    q_indptr: np.ndarray
    """int32 [n + 1]."""
    kv_lens: np.ndarray
    """int32 [n]."""
    slots: np.ndarray
    """int32 [n]."""
    few: np.ndarray
    """bool [n]: of one token behind the prompt."""


@dataclasses.dataclass(frozen=True, slots=True)
class Room:
    """What fixed buffers of attention hold."""

    n_few: int
    """Spans of one token."""
    n_large: int = 0
    """Lines of the kernel for many rows."""

    def holds(self, spans: ApartSpans, group: int) -> bool:
        """group: query heads of one KV head."""
        many = ~spans.few
        n_pieces = -(-spans.kv_lens[many] // INVARIANT_KEYS)
        n_large = (-(-np.diff(spans.q_indptr)[many] // large_tokens_of(group)) * n_pieces).sum()
        n_keys = spans.kv_lens[spans.few].sum()
        return bool(len(many) - many.sum() <= self.n_few and n_large <= self.n_large and n_keys <= MOST_KEYS)


def apart(q_indptr: np.ndarray, kv_lens: np.ndarray, slots: np.ndarray, prompt_lens: np.ndarray) -> ApartSpans:
    """Spans as of `FlatBatch`, cut: the part within the prompt, of prompt_lens int32 [n_spans] tokens, stays one."""
    lengths = np.diff(q_indptr)
    n_prompt = np.clip(prompt_lens - (kv_lens - lengths), 0, lengths)
    has_prompt = n_prompt > 0
    n_parts = has_prompt + lengths - n_prompt
    owner = np.repeat(np.arange(len(lengths)), n_parts)
    index = np.arange(len(owner)) - np.repeat(np.cumsum(n_parts) - n_parts, n_parts)
    few = ~(has_prompt[owner] & (index == 0))
    sizes = np.where(few, 1, n_prompt[owner])
    ends = np.cumsum(sizes)
    behind = q_indptr[1:][owner] - ends  # rows of its span that follow
    indptr = np.concatenate(([0], ends))
    return ApartSpans(
        indptr.astype(np.int32), (kv_lens[owner] - behind).astype(np.int32), slots[owner].astype(np.int32), few
    )
