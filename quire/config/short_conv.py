"""A gated short convolution as a token mixer (LFM2): y = out(c * conv(b * x)), where b, c, x = in(input).

Owns its description. Does not own what is computed (`compute/layers/short_conv`). Torch-free.
"""

from __future__ import annotations

from quire.config.parameters import Matrix, MixerParameters, Tensor
from quire.config.recurrent import RecurrentMixer
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
        tensors = {"weight": Tensor(name=at + "mixer.conv", shape=(self.size, 1, self.kernel))}
        if self.bias:
            tensors["bias"] = Tensor(name=at + "mixer.conv", shape=(self.size,), kind="bias")
        return MixerParameters(
            matrices={
                "in": Matrix(n_in=hidden_size, parts=((at + "mixer.in_proj", 3 * self.size),), bias=self.bias),
                "out": Matrix(n_in=self.size, parts=((at + "mixer.out_proj", hidden_size),), bias=self.bias),
            },
            tensors=tensors,
        )
