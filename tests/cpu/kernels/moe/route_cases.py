"""Routings for which kernels are compared with the reference."""

from __future__ import annotations

import msgspec
import torch

from quire.config.experts import RoutingSpec, Scores

ROUTINGS = (
    (4, RoutingSpec(n_chosen=1)),
    (60, RoutingSpec(n_chosen=4, renormalise=True)),
    (64, RoutingSpec(n_chosen=6, n_groups=8, n_chosen_groups=3, scale=2.5)),
    (24, RoutingSpec(n_chosen=3, scores=Scores.SIGMOID, renormalise=True, n_groups=3, n_chosen_groups=2)),
    (32, RoutingSpec(n_chosen=4, scores=Scores.SIGMOID, n_groups=4, n_chosen_groups=2, n_group_best=2)),
    (9, RoutingSpec(n_chosen=2, scores=Scores.EVEN)),
    (16, RoutingSpec(n_chosen=2, scores=Scores.SPARSE_MIXER, mixer_margin=0.02)),
)


def check(route, reference, tolerance: float) -> None:
    """A function of the shape of `reference.route` gives what that gives, and counts as it does."""
    for n_experts, routing in ROUTINGS:
        for corrected in (False, True):
            logits = torch.randn(5, n_experts) * 3
            logits[0, 1] = torch.nan
            logits[1] = 0.0
            is_possible = corrected and routing.scores is not Scores.SPARSE_MIXER
            correction = torch.randn(n_experts) if is_possible else None
            load, expected_load = (torch.ones(n_experts, dtype=torch.int64) for _ in range(2))
            ids, weights = route(logits, routing, correction, load)
            expected_ids, _ = reference(logits, routing, correction, expected_load)
            assert torch.equal(load, expected_load) and int(load.sum()) == ids.numel() + n_experts
            assert torch.equal(ids, expected_ids), (routing, ids, expected_ids)
            error = (weights - reference(logits.double(), routing, correction)[1]).abs().max()
            assert float(error) <= tolerance * routing.scale, (routing, error)


ROUTERS = (  # n, hidden, experts, routing, in float32, with a bias and a correction
    (1, 64, 4, RoutingSpec(n_chosen=1), True, False),
    (3, 2056, 24, ROUTINGS[3][1], True, True),
    (3, 72, 60, RoutingSpec(n_chosen=4, renormalise=True), False, True),
    (65, 40, 9, RoutingSpec(n_chosen=2), True, False),
    (1, 96, 136, msgspec.structs.replace(ROUTINGS[4][1], n_chosen=8, n_groups=8, n_chosen_groups=4), True, True),
    (2, 64, 9, RoutingSpec(n_chosen=2, scores=Scores.EVEN, scale=3.0), True, False),
)
"""For `check_choose`: fewer rows than a cluster has and more, columns beyond a whole step, experts beyond one pass."""
MANY = (
    (5, 2048, 64, RoutingSpec(n_chosen=6, n_groups=8, n_chosen_groups=3, scale=2.5), True, False),
    (33, 2048, 64, RoutingSpec(n_chosen=6), True, False),
    (67, 7168, 256, msgspec.structs.replace(ROUTINGS[4][1], n_chosen=8, n_groups=8, n_chosen_groups=4), True, True),
    (256, 2048, 128, RoutingSpec(n_chosen=8, renormalise=True), False, False),
    (512, 512, 512, RoutingSpec(n_chosen=10, renormalise=True), False, True),
)
"""Those that take an emulation too long."""


def check_choose(choose, reference, cases, dtype: torch.dtype, device: str, tolerance: float) -> None:
    """A function of the shape of `reference.choose` gives what that gives of the same numbers in float64."""
    for n, hidden, n_experts, routing, is_wide, corrected in cases:
        rows = torch.full((n, hidden + 8), torch.nan).to(dtype)
        rows[:, :hidden] = torch.randn(n, hidden).to(dtype)
        router = (torch.randn(n_experts, hidden) * 2 * hidden**-0.5).to(torch.float32 if is_wide else dtype)
        bias = torch.randn(n_experts).to(router.dtype) if corrected else None
        correction = torch.randn(n_experts) * 0.1 if corrected else None
        if n > 2:
            rows[1, :hidden] = 0  # all scores alike: the first are taken
            rows[2, 3] = torch.nan
        load = torch.ones(n_experts, dtype=torch.int64)
        wide = [None if one is None else one.double() for one in (rows[:, :hidden], router, bias)]
        expected_ids, expected = reference(*wide, routing, correction, None)
        x, router, bias, correction, load = (
            None if one is None else one.to(device) for one in (rows, router, bias, correction, load)
        )
        given = x[:, :hidden], router, bias, routing, correction
        ids, weights = (one.cpu() for one in choose(*given, load))
        counted = torch.bincount(ids.flatten(), minlength=n_experts) + 1
        assert torch.equal(load.cpu(), counted), (n, routing)
        assert ids.dtype == torch.int32 and weights.dtype == torch.float32
        if bias is None and n > 2 and routing.scores is not Scores.EVEN:
            assert ids[1].tolist() == expected_ids[1].tolist(), (n, routing)
        error = (weights - expected).abs().max(dim=1).values
        assert float(error.max()) <= tolerance * routing.scale * routing.n_chosen, (n, routing, error)
        unlike = ids != expected_ids  # of scores that differ less than sums in two orders do
        assert float(unlike.double().mean()) < 0.02, (n, routing, ids, expected_ids)
        alone = choose(x[n - 1 :, :hidden], *given[1:], None)
        if routing.scores is not Scores.EVEN:
            assert torch.equal(alone[0][0].cpu(), ids[-1]) and torch.equal(alone[1][0].cpu(), weights[-1])
