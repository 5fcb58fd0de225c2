"""What mixer and feed-forward give to the residual stream: their last product, and the points before it is added.

Owns those points. Its product is row-parallel (`config.parameters.Cut.ROW`): on each of several ranks it is a term of
the sum. Invariant: with nothing at the points, and neither norm nor factor, product and addition are one launch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from quire.compute.dist.added import RankSum
from quire.compute.layers.linear import Linear
from quire.compute.layers.norm import Norm
from quire.kernels import gemm
from quire.kernels.gemm.plan import MAX_NORM_ROWS
from quire.kernels.gemm.sent import MIN_SENT_ROWS

Between = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""`between(y, z)`: y [n, n_in], what the product took, z [n, hidden], what it gave → what is to be added to the stream
in place of z, which may be overwritten: z with an adapter's delta. It may be captured."""


class ResidualSum:
    """x + scale * norm(sum over ranks(between(y, z))), whatever made z of y."""

    def __init__(self, post_norm: Norm | None, scale: float) -> None:
        self._post_norm, self._scale = post_norm, scale
        self.between: Between | None = None
        """To be set before steps are captured or recorded, as `ranks`."""
        self.ranks: RankSum | None = None
        """Of several ranks."""
        self.is_apart = False
        """Whether the stream has another type than products give."""

    def add(self, y: torch.Tensor, z: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """y: [n, n_in]; z: [n, hidden]; x: the residual stream [n, hidden], which takes the sum in place and is
        returned."""
        if self.between is not None:
            z = self.between(y, z)
        if self.ranks is not None:
            if self._is_bare:
                self.ranks.add(z, x)
                return x
            z = self.ranks.all_reduce(z)
        return x.add_(z if self._post_norm is None else self._post_norm(z), alpha=self._scale)

    @property
    def _is_bare(self) -> bool:
        return self._post_norm is None and self._scale == 1.0 and not self.is_apart

    @property
    def adds(self) -> bool:
        """Whether what makes z adds it to the stream itself, as nothing stands between."""
        return self.between is None and self.ranks is None and self._is_bare


class ResidualProduct(ResidualSum):
    """x + scale * norm(sum over ranks(between(y, linear(y))))."""

    def __init__(self, linear: Linear, post_norm: Norm | None, scale: float) -> None:
        super().__init__(post_norm, scale)
        self.linear = linear

    def __call__(self, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """See `add`."""
        if self.adds:
            return self.linear(y, residual=x)
        if self._is_sent(y):
            self._add_sent(y, x, None)
            return x
        return self.add(y, self.linear(y), x)

    @property
    def sends_to(self) -> int:
        """Ranks to which the product of many rows sends its term itself; 0: it does not."""
        is_whole = self._is_bare and self.between is None and self.linear.floating is not None
        return self.ranks.sends_to if self.ranks is not None and is_whole else 0

    def _is_sent(self, y: torch.Tensor) -> bool:
        return len(y) >= MIN_SENT_ROWS and self.sends_to > 0

    def _add_sent(self, y: torch.Tensor, x: torch.Tensor, norm: gemm.Norm | None) -> torch.Tensor | None:
        assert self.ranks is not None and self.linear.floating is not None
        return self.ranks.add_product(y, self.linear.floating, self.linear.bias, x, norm)

    def then(self, y: torch.Tensor, x: torch.Tensor, norm: Norm | None) -> tuple[torch.Tensor, Norm | None]:
        """As the call; what a layer takes of the stream that norms it first, and the norm that is still to be done.

        The sum over ranks does it where a product does not take it in, being for too many rows."""
        is_many = self.ranks is not None and len(x) > MAX_NORM_ROWS
        if is_many and norm is not None and norm.pair is not None and self._is_bare:
            assert self.ranks is not None
            if self._is_sent(y):
                normed = self._add_sent(y, x, norm.pair)
            else:
                z = self.linear(y)
                normed = self.ranks.add(z if self.between is None else self.between(y, z), x, norm.pair)
            assert normed is not None
            return normed, None
        return self(y, x), norm
