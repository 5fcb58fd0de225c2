"""The choice of experts from rows of x: the router's product, then `route`. Any device, any number of rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from quire.config.experts import RoutingSpec
from quire.kernels import gemm
from quire.kernels.selector import select


def choose(
    x: torch.Tensor,
    router: torch.Tensor,
    bias: torch.Tensor | None,
    routing: RoutingSpec,
    correction: torch.Tensor | None,
    load: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See op.py."""
    if router.dtype is torch.float32:
        logits = F.linear(x.float(), router, bias)
    else:
        logits = torch.empty(len(x), len(router), dtype=torch.float32, device=x.device)
        gemm.linear(x, router, bias, out=logits)
    found: tuple[torch.Tensor, torch.Tensor] = select("moe", "route", logits)(logits, routing, correction, load)
    return found
