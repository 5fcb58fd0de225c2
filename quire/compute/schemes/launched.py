"""`Launched`: a product of an op of `kernels` on tensors that were filled before."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from quire.kernels import gemm
from quire.kernels.around import Norm


@dataclasses.dataclass(frozen=True, slots=True)
class Launched:
    """See `Product`."""

    tensors: dict[str, torch.Tensor]
    run: Callable[..., torch.Tensor]
    """run(x, bias, ...): the op on these tensors."""
    ahead: gemm.Coded | None = None
    """Which kernels it wants, the same object for all of a form; None: that is found at the first call."""

    def __call__(
        self,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        norm: Norm | None = None,
        residual: torch.Tensor | None = None,
        silu_mul: bool = False,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `Product`."""
        return self.run(x, bias, norm=norm, residual=residual, silu_mul=silu_mul, out=out)
