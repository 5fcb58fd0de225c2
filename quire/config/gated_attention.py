"""Grouped-query attention whose result is gated by its input (Qwen3-Next): y * sigmoid(gate), in front of `out`.

Owns what differs from `attention`. Does not own what is computed (`compute/layers/gated_attention`). Torch-free.
"""

from __future__ import annotations

import msgspec

from quire.config.attention import AttentionSpec
from quire.config.parameters import MixerParameters, Section


class GatedAttentionSpec(AttentionSpec, frozen=True, kw_only=True):
    """Rows of its query projection: all queries, all gates."""

    @property
    def n_row_numbers(self) -> int:
        return super().n_row_numbers + 3 * self.q_size

    @property
    def words(self) -> str:
        return super().words + ", gated"

    def parameters(self, at: str, hidden_size: int) -> MixerParameters:
        """Those of attention, with gates in 'qkv'."""
        found = super().parameters(at, hidden_size)
        matrix = found.matrices["qkv"]
        (q, rows), *others = matrix.parts
        queries, keys = Section(rows, self.head_dim), Section(self.kv_size, self.head_dim, is_repeated=True)
        sections = (queries, queries), (keys,), (keys,)
        qkv = msgspec.structs.replace(matrix, parts=((q, 2 * rows), *others), whole="", sections=sections)
        return msgspec.structs.replace(found, matrices={**found.matrices, "qkv": qkv})

    def grouped(self, name: str) -> tuple[int, ...]:
        """Of q_proj: queries, gates."""
        return self.head_dim, self.head_dim
