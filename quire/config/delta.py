"""Gated DeltaNet as a token mixer (Yang et al. 2024, as in Qwen3-Next): a short convolution of queries, keys and
values, the gated delta rule, a norm of each head, a gate.

Owns its description. Does not own what is computed (`compute/layers/delta`). Torch-free.
"""

from __future__ import annotations

from typing import Final

import msgspec

from quire.config.layers import NormSpec
from quire.config.parameters import Cut, Matrix, MixerParameters, NormTable, Section, Tensor
from quire.config.recurrent import RecurrentMixer
from quire.config.shares import part_of
from quire.config.states import PIECE, StatePart, StateSpec

FLOAT32_BYTES: Final = 4
N_TRIANGLES, N_SCALES = 2, 4
"""Of a piece and head: what kernels solve beforehand, triangles in the rows' type, and numbers of each row in float32
(`kernels/state`)."""


class DeltaSpec(RecurrentMixer, frozen=True, kw_only=True):
    """See `MixerSpec` for what all mixers say."""

    n_key_heads: int
    n_value_heads: int
    """A multiple of n_key_heads."""
    key_dim: int
    value_dim: int
    kernel: int
    """Tokens that the convolution sees."""
    eps: float

    @property
    def inner_size(self) -> int:
        """Columns of all values."""
        return self.n_value_heads * self.value_dim

    @property
    def conv_size(self) -> int:
        """Columns of the convolution: queries, keys and values."""
        return 2 * self.n_key_heads * self.key_dim + self.inner_size

    @property
    def state_spec(self) -> StateSpec:
        state = self.n_value_heads, self.key_dim, self.value_dim
        return StateSpec((StatePart((self.kernel - 1, self.conv_size)), StatePart(state, is_exact=True)))

    @property
    def n_row_numbers(self) -> int:
        return 3 * self.conv_size + 4 * self.inner_size

    @property
    def n_solved_numbers(self) -> int:
        """Of a token, those that are there while a GPU solves pieces: what the projection and the convolution gave, and
        the result."""
        return 2 * (self.conv_size + self.inner_size + self.n_value_heads)

    def pieces_bytes(self, n_pieces: int, itemsize: int) -> int:
        """What a GPU has beside them of so many pieces, however few rows these have. itemsize: of a row's numbers."""
        of_head = N_TRIANGLES * PIECE * PIECE * itemsize + N_SCALES * PIECE * FLOAT32_BYTES
        return n_pieces * self.n_value_heads * of_head

    @property
    def words(self) -> str:
        return (
            f"gated DeltaNet, {self.n_value_heads} heads of {self.value_dim}, {self.n_key_heads} of keys of "
            f"{self.key_dim}, convolution of {self.kernel} tokens"
        )

    def parameters(self, at: str, hidden_size: int) -> MixerParameters:
        """Projections 'in' and 'out', norm 'head'. Rows of 'in': queries, keys, values, gates, weights, decays."""
        own, cut, heads = at + "mixer", Cut.COLUMN, (self.n_value_heads,)
        keys, values = Section(self.n_key_heads * self.key_dim, self.key_dim), Section(self.inner_size, self.value_dim)
        gates = Section(self.n_value_heads)
        sections = {"in_proj_qkvz": (keys, keys, values, values), "in_proj_ba": (gates, gates)}
        parts = tuple((f"{own}.{name}", sum(one.n_rows for one in inside)) for name, inside in sections.items())
        shape = self.conv_size, 1, self.kernel
        return MixerParameters(
            matrices={
                "in": Matrix(n_in=hidden_size, parts=parts, cut=cut, sections=tuple(sections.values())),
                "out": Matrix(
                    n_in=self.inner_size, parts=((own + ".out_proj", hidden_size),), cut=Cut.ROW, unit=self.value_dim
                ),
            },
            norms={"head": NormTable(name=own + ".norm", shape=(self.value_dim,), spec=NormSpec(eps=self.eps))},
            tensors={
                "weight": Tensor(name=own + ".conv1d", shape=shape, cut=cut, sections=(keys, keys, values)),
                **{
                    kind: Tensor(name=own, shape=heads, kind=kind, is_float32=True, cut=cut)
                    for kind in ("A_log", "dt_bias")
                },
            },
        )  # fmt: skip

    def share(self, rank: int, n_ranks: int) -> DeltaSpec:
        """Its heads of keys, with the values that go with them."""
        n_keys = part_of(f"gated DeltaNet has {self.n_key_heads} heads of keys", self.n_key_heads, n_ranks)
        return msgspec.structs.replace(self, n_key_heads=n_keys, n_value_heads=self.n_value_heads // n_ranks)

    def grouped(self, name: str) -> tuple[int, ...]:
        """Of in_proj_qkvz and in_proj_ba, for each key head."""
        n = self.n_value_heads // self.n_key_heads
        return (self.key_dim, self.key_dim, *[n * self.value_dim] * 2) if name == "in_proj_qkvz" else (n, n)
