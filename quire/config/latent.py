"""Latent attention as a token mixer: all heads read one line a token, which keys and values are made of.

DeepSeek-V2, arXiv 2405.04434, section 2.1. Owns its description. Does not own what is computed
(`compute/layers/latent`). Torch-free.
"""

from __future__ import annotations

import msgspec

from quire.config.layers import KVSpec, NormSpec, Rotated
from quire.config.parameters import Cut, Matrix, MixerParameters, NormTable, Tensor
from quire.config.rope import Rope
from quire.config.shares import part_of


class LatentAttentionSpec(msgspec.Struct, frozen=True, kw_only=True):
    """See `MixerSpec` for what all mixers say."""

    n_heads: int
    q_lora_rank: int
    """Numbers that queries are made of, normed; 0: they are projected from the stream."""
    kv_lora_rank: int
    """Numbers that keys and values are made of, normed: the first part of a token's line."""
    qk_nope_head_dim: int
    """Dimensions of a query and key that have no position."""
    qk_rope_head_dim: int
    """Those that are rotated; of a key all heads have the same: the rest of the line."""
    v_head_dim: int
    scale: float
    """Factor on q·k."""
    rope: Rope
    norm: NormSpec
    """Of what queries are made of, and of what keys and values are."""
    bias: bool = False
    """Of the projections from the stream, and the one to it; not of queries without a rank."""

    @property
    def line_dim(self) -> int:
        """Numbers of a token's line."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def qk_head_dim(self) -> int:
        """Of a query."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def kv_spec(self) -> KVSpec:
        return KVSpec(1, self.line_dim, value_in_key=self.kv_lora_rank)

    @property
    def state_spec(self) -> None:
        return None

    @property
    def rope_head_dim(self) -> int:
        return self.qk_rope_head_dim

    @property
    def n_row_numbers(self) -> int:
        """The projections, and the larger of: queries against lines and what these give; the lines of a token, what is
        made of them or given by attention, keys, values and queries of one size, and rows that are taken out."""
        d, v = self.qk_head_dim, self.v_head_dim
        size, taken_out = max(d, v), d + self.qk_rope_head_dim + v
        against_lines = self.n_heads * (self.line_dim + self.kv_lora_rank)
        of_head = self.qk_rope_head_dim + taken_out + 3 * size + max(self.qk_nope_head_dim + v, size)
        made = self.line_dim + self.n_heads * of_head
        return self.q_lora_rank + self.line_dim + self.n_heads * (d + v) + max(against_lines, made)

    @property
    def n_pair_flops(self) -> int:
        """Against lines."""
        return 2 * self.n_heads * (self.line_dim + self.kv_lora_rank)

    def spared_flops(self, n_rows: int, n_keys: int) -> int:
        """Where keys and values are made of all lines. Making those of the rows themselves costs what the products
        around lines do, which then fall away."""
        start, of_pair = n_keys - n_rows, 2 * self.n_heads * (self.qk_head_dim + self.v_head_dim)
        making = 2 * self.n_heads * (self.qk_nope_head_dim + self.v_head_dim) * self.kv_lora_rank
        n_pairs = n_rows * start + n_rows * (n_rows + 1) // 2
        return n_pairs * (self.n_pair_flops - of_pair) - start * making

    @property
    def words(self) -> str:
        found = [f"latent, {self.n_heads} heads of {self.qk_nope_head_dim} + {self.qk_rope_head_dim}"]
        found += [f"values of {self.v_head_dim}", f"a line of {self.kv_lora_rank} + {self.qk_rope_head_dim} a token"]
        found += [f"queries of {self.q_lora_rank}"] if self.q_lora_rank else []
        found += [f"normed ({self.norm.words})", f"scale {self.scale:.6g}"]
        return ", ".join([*found, "bias"] if self.bias else found)

    @property
    def position_words(self) -> tuple[str, ...]:
        return (self.rope.words(self.qk_rope_head_dim),)

    def parameters(self, at: str, hidden_size: int) -> MixerParameters:
        """Projections 'a' (of the stream, and 'q' where queries have no rank), 'q_b' and 'out'; the tensor 'kv_b', of
        which each head's rows make keys, then values; norms 'q' and 'kv'."""
        at = f"{at}self_attn."
        q_rows, line = self.n_heads * self.qk_head_dim, (f"{at}kv_a_proj_with_mqa", self.line_dim)
        if self.q_lora_rank:
            first = {
                "a": Matrix(n_in=hidden_size, parts=((f"{at}q_a_proj", self.q_lora_rank), line), bias=self.bias),
                "q_b": Matrix(
                    n_in=self.q_lora_rank, parts=((f"{at}q_b_proj", q_rows),), cut=Cut.COLUMN, unit=self.qk_head_dim
                ),
            }  # fmt: skip
        else:
            first = {
                "q": Matrix(n_in=hidden_size, parts=((f"{at}q_proj", q_rows),), cut=Cut.COLUMN, unit=self.qk_head_dim),
                "a": Matrix(n_in=hidden_size, parts=(line,), bias=self.bias),
            }
        ranks = {"q": ("q_a_layernorm", self.q_lora_rank), "kv": ("kv_a_layernorm", self.kv_lora_rank)}
        made = self.qk_nope_head_dim + self.v_head_dim
        return MixerParameters(
            matrices={
                **first,
                "out": Matrix(
                    n_in=self.n_heads * self.v_head_dim, parts=((f"{at}o_proj", hidden_size),), bias=self.bias,
                    cut=Cut.ROW, unit=self.v_head_dim,
                ),
            },
            norms={
                place: NormTable(name=at + name, shape=(size,), spec=self.norm)
                for place, (name, size) in ranks.items()
                if size
            },
            tensors={
                "kv_b": Tensor(
                    name=f"{at}kv_b_proj", shape=(self.n_heads * made, self.kv_lora_rank), cut=Cut.COLUMN, unit=made
                )
            },
        )  # fmt: skip

    def rotated(self, name: str) -> Rotated | None:
        """Of what makes queries, and the line."""
        if name in ("q_proj", "q_b_proj"):
            return Rotated(self.n_heads, self.qk_nope_head_dim, self.qk_rope_head_dim)
        return Rotated(1, self.kv_lora_rank, self.qk_rope_head_dim) if name == "kv_a_proj_with_mqa" else None

    def grouped(self, name: str) -> tuple[int, ...]:
        """None is."""
        return ()

    def share(self, rank: int, n_ranks: int) -> LatentAttentionSpec:
        """Its heads; every rank has all lines."""
        n_heads = part_of(f"attention has {self.n_heads} query heads", self.n_heads, n_ranks)
        return msgspec.structs.replace(self, n_heads=n_heads)
