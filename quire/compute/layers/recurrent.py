"""What all recurrent mixers have alike: projections in and out, other numbers, no attention.

Owns these. Does not own any data flow (`short_conv`, `mamba`, `delta`) nor states (`Context`).
"""

from __future__ import annotations

from typing import Any

import torch

from quire.compute.dist.added import RankSum
from quire.compute.layers.linear import Linear, Make, Table
from quire.compute.layers.norm import Norm
from quire.compute.schemes.choice import Schemes
from quire.config.parameters import MixerParameters
from quire.kernels import gemm
from quire.kernels.attention.variant import Variant


class Recurrent:
    """A part of `Mixer`."""

    variant: Variant | None = None
    is_plain = False
    ranks: RankSum | None = None

    spec: Any
    """Each says which."""

    def __init__(
        self,
        spec: Any,
        parameters: MixerParameters,
        layer: int,
        make: Make,
        schemes: Schemes,
        cos_sin: torch.Tensor,
    ) -> None:
        self.spec, self.layer, self.cos_sin = spec, layer, cos_sin
        self.inputs, self.out = (
            Linear(make, matrix, schemes.of(matrix)) for matrix in (parameters.matrices[one] for one in ("in", "out"))
        )
        self._tables = {place: Table(make, table) for place, table in parameters.tensors.items()}
        self._norms = {place: Norm(make, table) for place, table in parameters.norms.items()}

    def numbers(self, place: str) -> torch.Tensor:
        """Of a table."""
        return self._tables[place].values

    @property
    def taps(self) -> torch.Tensor:
        """Of the convolution, [columns, tokens]."""
        return self.numbers("weight").squeeze(1)

    @property
    def conv_bias(self) -> torch.Tensor | None:
        """Of the convolution, [columns]."""
        return self.numbers("bias") if "bias" in self._tables else None

    def norm_weight(self, place: str) -> torch.Tensor:
        """Of a norm that stands with a gate."""
        weight = self._norms[place].weight
        assert weight is not None
        return weight

    @property
    def linears(self) -> tuple[Linear, ...]:
        """See `Mixer`."""
        return self.inputs, self.out

    @property
    def norms(self) -> tuple[Norm, ...]:
        """See `Mixer`."""
        return tuple(self._norms.values())

    @property
    def tables(self) -> tuple[Table, ...]:
        """See `Mixer`."""
        return tuple(self._tables.values())

    def kernels(self, *, norm: bool) -> list[gemm.LinearShape]:
        """See `Mixer`."""
        return [self.inputs.kernel(norm=norm)]
