"""What all recurrent mixers say alike: they keep a state of a sequence and no keys.

Owns these answers. Does not own any mixer (`short_conv`, `mamba`, `delta`). Torch-free.
"""

from __future__ import annotations

import msgspec

from quire.config.layers import KVSpec, Rotated
from quire.config.rope import Rope


class RecurrentMixer(msgspec.Struct, frozen=True, kw_only=True):
    """A part of `MixerSpec`."""

    @property
    def n_heads(self) -> int:
        """Nobody reads what tokens leave."""
        return 0

    @property
    def rope(self) -> Rope | None:
        return None

    @property
    def rope_head_dim(self) -> int:
        return 0

    @property
    def kv_spec(self) -> KVSpec | None:
        return None

    @property
    def n_pair_flops(self) -> int:
        """A token sees the state, not other tokens."""
        return 0

    def spared_flops(self, n_rows: int, n_keys: int) -> int:
        """None: there are no pairs."""
        return 0

    @property
    def position_words(self) -> tuple[str, ...]:
        return ()

    def rotated(self, name: str) -> Rotated | None:
        """None is."""
        return None

    def grouped(self, name: str) -> tuple[int, ...]:
        """None is."""
        return ()
