"""No feed-forward: the layer is its mixer alone (Mamba). Torch-free."""

from __future__ import annotations

import msgspec

from quire.config.parameters import FfnParameters


class NoFfnSpec(msgspec.Struct, frozen=True, kw_only=True):
    """See `FfnSpec`. Neither is there a norm before it."""

    size: int = 0

    @property
    def is_plain(self) -> bool:
        """See `FfnSpec`."""
        return False

    @property
    def words(self) -> str:
        """See `FfnSpec`."""
        return "none"

    def n_row_numbers(self, hidden_size: int) -> int:
        """See `FfnSpec`."""
        return 0

    def n_idle_weights(self, hidden_size: int, n_tokens: int) -> float:
        """See `FfnSpec`."""
        return 0.0

    def parameters(self, at: str, hidden_size: int) -> FfnParameters:
        """See `FfnSpec`."""
        return FfnParameters(matrices={})

    def share(self, rank: int, n_ranks: int) -> NoFfnSpec:
        """See `FfnSpec`."""
        return self
