"""A gated short convolution as a token mixer (LFM2): y = out(c * conv(b * x)), where b, c, x = in(input).

Owns its description. Does not own what is computed (`compute/layers/short_conv`). Torch-free.
"""

from __future__ import annotations

import msgspec

from quire.config.parameters import Cut, Matrix, MixerParameters, Section, Tensor
from quire.config.recurrent import RecurrentMixer
from quire.config.shares import part_of
from quire.config.states import StatePart, StateSpec


class ShortConvSpec(RecurrentMixer, frozen=True, kw_only=True):
    """See `MixerSpec` for what all mixers say."""

    size: int
    """Columns."""
    kernel: int
    """Tokens that a column sees."""
    bias: bool = False

    @property
    def state_spec(self) -> StateSpec:
        return StateSpec((StatePart((self.kernel - 1, self.size)),))

    @property
    def n_row_numbers(self) -> int:
        return 5 * self.size

    @property
    def words(self) -> str:
        return f"short convolution of {self.kernel} tokens in {self.size:,} columns{', bias' if self.bias else ''}"

    def parameters(self, at: str, hidden_size: int) -> MixerParameters:
        """Projections 'in' and 'out', the convolution's 'weight' and 'bias'."""
        conv, cut = at + "mixer.conv", Cut.COLUMN
        tensors = {"weight": Tensor(name=conv, shape=(self.size, 1, self.kernel), cut=cut)}
        if self.bias:
            tensors["bias"] = Tensor(name=conv, shape=(self.size,), kind="bias", cut=cut)
        return MixerParameters(
            matrices={
                "in": Matrix(
                    n_in=hidden_size, parts=((at + "mixer.in_proj", 3 * self.size),), bias=self.bias, cut=cut,
                    sections=((Section(self.size),) * 3,),
                ),
                "out": Matrix(
                    n_in=self.size, parts=((at + "mixer.out_proj", hidden_size),), bias=self.bias, cut=Cut.ROW
                ),
            },
            tensors=tensors,
        )  # fmt: skip

    def share(self, rank: int, n_ranks: int) -> ShortConvSpec:
        """Its columns."""
        size = part_of(f"a short convolution has {self.size} columns", self.size, n_ranks)
        return msgspec.structs.replace(self, size=size)
