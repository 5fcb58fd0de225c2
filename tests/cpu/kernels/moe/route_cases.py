"""Routings for which kernels are compared with the reference."""

from __future__ import annotations

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
