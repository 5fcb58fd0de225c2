"""Mixtures of experts in plain torch: the oracle. One expert after another, each for its own tokens.

Arithmetic in float32, or in float64 for float64 inputs, where nothing is rounded between, and where rows are rounded to
e4m3: what is multiplied is what kernels multiply, code for code.
"""

from __future__ import annotations

from typing import TypeGuard

import torch
import torch.nn.functional as F

from quire.config.experts import Gating, RoutingSpec, Scores
from quire.kernels import lora
from quire.kernels.moe.adapted import ExpertAdapters
from quire.kernels.moe.coded import CodedMatrices, Matrices
from quire.kernels.moe.packed import PackedExperts
from quire.kernels.qgemm.reference import linear
from quire.kernels.w8a8.reference import quantise

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3.2e-2}
"""dtype → largest |kernel - float64 reference| / (1 + |reference|) of `experts`, for results of about 1."""
ROUNDED_TOLERANCE, ROUNDED_NORM = 0.15, 1.8e-2
"""The same where rows are rounded to e4m3, of any dtype, and largest |kernel - reference| / |reference| of all results:
the last digits of a sum may move a number of the inner vector to its next code, a sixteenth away. Noise of 1e-3 in the
first product gives 0.1 and 1.05e-2; no rounding at all 0.1 to 0.28 and at least 2.7e-2."""
ROUTE_TOLERANCE = 2e-6
"""Largest |kernel - float64 reference| of a weight of `route`, where the scale is 1."""


def route(
    logits: torch.Tensor,
    routing: RoutingSpec,
    correction: torch.Tensor | None,
    load: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See op.py; for float64 logits the weights are float64."""
    logits = logits.nan_to_num(nan=-torch.finfo(logits.dtype).max)
    if routing.scores is Scores.EVEN:
        expert_ids, weights = _in_turn(logits, routing.n_chosen)
    elif routing.scores is Scores.SPARSE_MIXER:
        expert_ids, weights = _mix_sparsely(logits, routing)
    else:
        scores = logits.sigmoid() if routing.scores is Scores.SIGMOID else logits.softmax(dim=-1)
        choice = scores if correction is None else scores + correction
        expert_ids = _largest(_of_chosen_groups(choice, routing), routing.n_chosen)
        weights = scores.gather(1, expert_ids)
    if load is not None:
        load.add_(torch.bincount(expert_ids.flatten(), minlength=len(load)))
    if routing.renormalise:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + torch.finfo(torch.float32).tiny)
    return expert_ids.int(), weights * routing.scale


def choose(
    x: torch.Tensor,
    router: torch.Tensor,
    bias: torch.Tensor | None,
    routing: RoutingSpec,
    correction: torch.Tensor | None,
    load: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See op.py."""
    wide = torch.promote_types(x.dtype, torch.float32)
    logits = F.linear(x.to(wide), router.to(wide), None if bias is None else bias.to(wide))
    return route(logits, routing, correction, load)


def _largest(values: torch.Tensor, k: int) -> torch.Tensor:
    """Places of the k largest of each row; of equal ones the first come first."""
    places: torch.Tensor = values.sort(dim=-1, descending=True, stable=True).indices
    return places[:, :k]


def _of_chosen_groups(choice: torch.Tensor, routing: RoutingSpec) -> torch.Tensor:
    """[n, E] with -inf outside the chosen groups."""
    if routing.n_chosen_groups == routing.n_groups:
        return choice
    groups = choice.unflatten(1, (routing.n_groups, -1))  # type: ignore[no-untyped-call]
    best = groups.topk(min(routing.n_group_best, groups.shape[2]), dim=-1).values.sum(dim=-1)
    is_chosen = torch.zeros_like(best, dtype=torch.bool).scatter(1, _largest(best, routing.n_chosen_groups), True)
    left: torch.Tensor = groups.masked_fill(~is_chosen.unsqueeze(2), -torch.inf)
    return left.flatten(1)


def _mix_sparsely(logits: torch.Tensor, routing: RoutingSpec) -> tuple[torch.Tensor, torch.Tensor]:
    left, expert_ids, weights = logits, [], []
    for _ in range(routing.n_chosen):
        best = left.max(dim=-1, keepdim=True).values
        at = _largest(left, 1)
        is_far = (best - logits) / torch.maximum(logits.abs(), best) > routing.mixer_margin
        weights.append(left.masked_fill(is_far, -torch.inf).softmax(dim=-1).gather(1, at))
        expert_ids.append(at)
        left = left.scatter(1, at, -torch.inf)
    return torch.cat(expert_ids, dim=1), torch.cat(weights, dim=1)


def _in_turn(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    n, n_experts = logits.shape
    expert_ids = torch.arange(n * k, device=logits.device).view(n, k) % n_experts
    return expert_ids, torch.full_like(expert_ids, 1 / k, dtype=logits.dtype)


def experts(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
    up: Matrices,
    down: Matrices,
    gating: Gating,
    up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See op.py."""
    total = _total(x, expert_ids, weights, up, down, None, gating, up_bias, down_bias, residual)
    target = out if residual is None else residual
    return total.to(x.dtype) if target is None else target.copy_(total)


def experts_with_shared(
    x: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor, up: torch.Tensor, down: torch.Tensor,
    shared_up: torch.Tensor, shared_down: torch.Tensor, residual: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """See op.py."""
    wide = torch.promote_types(x.dtype, torch.float32)
    total = torch.zeros(x.shape, dtype=wide, device=x.device) if residual is None else residual.to(wide)
    inner = gate(F.linear(x.to(wide), shared_up.to(wide)), Gating()).to(x.dtype).to(wide)
    total = experts(x.to(wide), expert_ids, weights, up, down, Gating(), residual=total)
    total = total + F.linear(inner, shared_down.to(wide))
    return total.to(x.dtype) if residual is None else residual.copy_(total)


def adapted_experts(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
    up: Matrices,
    down: Matrices,
    adapters: ExpertAdapters,
    gating: Gating,
    up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """See adapted.py."""
    total = _total(x, expert_ids, weights, up, down, adapters, gating, up_bias, down_bias, residual)
    return total.to(x.dtype) if residual is None else residual.copy_(total)


def _total(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
    up: Matrices,
    down: Matrices,
    adapters: ExpertAdapters | None,
    gating: Gating,
    up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    residual: torch.Tensor | None,
) -> torch.Tensor:
    """Sums that are not rounded yet. adapters None: no row has one."""
    wide = torch.float64 if _is_rounding(up) else torch.promote_types(x.dtype, torch.float32)
    total = torch.zeros(x.shape, dtype=wide, device=x.device) if residual is None else residual.to(wide)
    for expert in sorted(set(expert_ids.flatten().tolist()) - {-1}):
        rows, at = torch.where(expert_ids == expert)
        places = [] if adapters is None else adapters.places[rows].tolist()
        numbers = [-1 if place < 0 else place * down.shape[0] + expert for place in places]
        given = _taken(x[rows], up).to(wide)
        both = F.linear(given, up[expert].to(wide), None if up_bias is None else up_bias[expert].to(wide))
        if adapters is not None:
            _add(x[rows].to(wide), adapters.up, numbers, both)
        made = gate(both, gating).to(x.dtype)
        inner = _taken(made, down).to(wide)
        y = F.linear(inner, down[expert].to(wide), None if down_bias is None else down_bias[expert].to(wide))
        if adapters is not None:
            _add(made.to(wide), adapters.down, numbers, y)
        total.index_add_(0, rows, y * weights[rows, at, None].to(wide))
    return total


def _add(x: torch.Tensor, stack: lora.Stack, numbers: list[int], y: torch.Tensor) -> None:
    """What the adapters with these numbers in the stack, of each row, add to y; -1: none."""
    ranks = stack.ranks.tolist()
    for row, number in enumerate(numbers):
        start = 0
        for part, size in enumerate(stack.sizes if number >= 0 else ()):
            first, rank, end = part * stack.most, ranks[number][part], start + size
            a, b = stack.a[number, first : first + rank].to(x.dtype), stack.b[number, start:end, :rank].to(x.dtype)
            y[row, start:end] += b @ (a @ x[row])
            start = end


def _is_rounding(matrices: Matrices) -> TypeGuard[CodedMatrices]:
    return isinstance(matrices, CodedMatrices) and matrices.rounds_inputs


def _taken(rows: torch.Tensor, matrices: Matrices) -> torch.Tensor:
    """What is multiplied by a matrix: the rows, or the numbers of their codes in float64."""
    if not _is_rounding(matrices):
        return rows
    group = matrices.group or matrices.k
    codes, scales = quantise(rows, matrices.codes.dtype, group)
    return codes.double() * scales.double().repeat_interleave(group, 1)[:, : matrices.k]


def packed_experts(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
    matrices: PackedExperts,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """See packed.py: each expert's linear layers, for its own tokens."""
    total = torch.zeros(x.shape) if residual is None else residual.float()
    none: list[torch.Tensor | None] = [None] * len(matrices.up)
    biases = [each or none for each in (matrices.up_biases, matrices.down_biases)]
    for place in range(expert_ids.shape[1]):
        for expert, (up, down) in enumerate(zip(matrices.up, matrices.down, strict=True)):
            rows = torch.where(expert_ids[:, place] == expert)[0]
            if len(rows):
                inner = linear(x[rows], up, biases[0][expert], silu_mul=True)
                y = linear(inner, down, biases[1][expert])
                total[rows] += y.float() * weights[rows, place, None]
    return total.to(x.dtype) if residual is None else residual.copy_(total)


def gate(both: torch.Tensor, gating: Gating) -> torch.Tensor:
    """[n, 2 * inner], gates first → [n, inner], in their dtype."""
    gates, ups = both.chunk(2, dim=-1)
    if gating.limit:
        gates, ups = gates.clamp(max=gating.limit), ups.clamp(-gating.limit, gating.limit)
    return (ups + gating.offset) * gates * torch.sigmoid(gating.slope * gates)
