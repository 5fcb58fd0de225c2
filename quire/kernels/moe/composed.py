"""One operation after another, on any device: the router's product and `route`, `experts` and the shared products."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from quire.config.experts import Gating, RoutingSpec
from quire.kernels import gemm
from quire.kernels.gemm.plan import MAX_FEW_ROWS
from quire.kernels.invariance import are_rows_alone
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


def experts_with_shared(
    x: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor, up: torch.Tensor, down: torch.Tensor,
    shared_up: torch.Tensor, shared_down: torch.Tensor, residual: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """See op.py. Of many rows what all share comes first: its weights are on their way while the router chooses. Each
    of both rounds the stream, so that the order shows in bits: where rows are to be alone it is one for any number."""
    arguments = (x, expert_ids, weights, up, down, Gating(), None, None)

    def add_shared(y: torch.Tensor | None) -> torch.Tensor:
        return gemm.linear(gemm.linear(x, shared_up, silu_mul=True), shared_down, residual=y)

    def add_experts(y: torch.Tensor | None) -> torch.Tensor:
        found: torch.Tensor = select("moe", "experts", *arguments, y, None)(*arguments, y, None)
        return found

    if len(x) > MAX_FEW_ROWS and not are_rows_alone():
        return add_experts(add_shared(residual))
    return add_shared(add_experts(residual))
