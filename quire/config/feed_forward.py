"""The feed-forward of matrices that every token goes through, as data: what it stores, and its part on one rank.

Owns its description. Does not own what is computed (`compute/layers/feed_forward`). Torch-free.
"""

from __future__ import annotations

import msgspec

from quire.config.layers import Activation
from quire.config.parameters import Cut, FfnParameters, Matrix
from quire.config.shares import part_of


class FeedForwardSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Two matrices with an activation between, or three: act(gate(x)) * up(x) goes into down. See `FfnSpec`."""

    size: int
    activation: Activation = Activation.SILU
    gated: bool = True
    bias: bool = False
    module: str = "mlp"
    """Name of what holds it in a layer."""

    @property
    def is_plain(self) -> bool:
        """See `FfnSpec`."""
        return self.gated and self.activation is Activation.SILU

    @property
    def words(self) -> str:
        """See `FfnSpec`."""
        kind = "gated" if self.gated else "plain"
        return f"{kind} {self.activation.value}, {self.size:,} wide" + ", bias" * self.bias

    def n_row_numbers(self, hidden_size: int) -> int:
        """See `FfnSpec`: gate, up, and what is made of them."""
        return 3 * self.size

    def n_idle_weights(self, hidden_size: int, n_tokens: int) -> float:
        """See `FfnSpec`: each token goes through all."""
        return 0.0

    def parameters(self, at: str, hidden_size: int) -> FfnParameters:
        """See `FfnSpec`."""
        return FfnParameters(matrices=self.matrices(f"{at}{self.module}.", hidden_size))

    def matrices(self, at: str, hidden_size: int) -> dict[str, Matrix]:
        """'up', with the gate where there is one, and 'down', of names that begin with `at`."""
        ups = ("gate", "up") if self.gated else ("up",)
        return {
            "up": Matrix(
                n_in=hidden_size, parts=tuple((f"{at}{name}_proj", self.size) for name in ups), bias=self.bias,
                whole=at + "gate_up_proj" if self.gated else "", cut=Cut.COLUMN,
            ),
            "down": Matrix(n_in=self.size, parts=((at + "down_proj", hidden_size),), bias=self.bias, cut=Cut.ROW),
        }  # fmt: skip

    def share(self, rank: int, n_ranks: int) -> FeedForwardSpec:
        """See `FfnSpec`."""
        size = part_of(f"a feed-forward is {self.size} wide", self.size, n_ranks)
        return msgspec.structs.replace(self, size=size)
