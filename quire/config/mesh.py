"""Which rank has which part of a model: numbers of ranks along each axis, and a rank's place. Torch-free.

Owns the arithmetic. Does not own what a part is (`shares`) nor how ranks speak (`compute/dist`).
Invariant: ranks that share a layer are neighbours; rank 0 has a part of the first layer.
"""

from __future__ import annotations

import msgspec

from quire.config.engine import EngineConfig


class MeshShape(msgspec.Struct, frozen=True):
    """Ranks of one engine."""

    tensor: int = 1
    """That share every layer."""

    @property
    def n_ranks(self) -> int:
        """All of them."""
        return self.tensor


def mesh_shape(config: EngineConfig) -> MeshShape:
    """As it was asked for."""
    return MeshShape(tensor=config.tensor_parallel_size)
