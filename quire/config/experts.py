"""A feed-forward of experts, as data: how many there are, which of them a token goes through, and what one computes.

Owns the vocabulary of routing and of experts. Does not own names of parameters (`expert_parameters`) nor how any of it
is computed (`kernels/moe`). Invariant: `n_chosen` distinct experts are chosen for each token, out of the groups chosen.
"""

from __future__ import annotations

import enum

import msgspec


@enum.unique
class Scores(enum.Enum):
    """What the logits [E] of a token become: both what is chosen by and what weighs."""

    SOFTMAX = "softmax"
    """Over all experts. Renormalised, the weights are the softmax over the chosen ones alone (Mixtral, gpt-oss)."""
    SIGMOID = "sigmoid"
    """Each for itself (DeepSeek-V3, section 2.1.2)."""
    SPARSE_MIXER = "sparse_mixer"
    """The logits choose, one expert after another; each weighs what a softmax over those not yet chosen gives it, where
    those far below it count nothing (`mixer_margin`; Liu et al. 2024, arXiv:2409.12136; Phi-3.5)."""


class Gating(msgspec.Struct, frozen=True, kw_only=True):
    """Between the matrices of an expert: (u + offset) * g * sigmoid(slope * g), g the gate's output and u the up's.

    As it is by default it is SwiGLU: silu(g) * u.
    """

    slope: float = 1.0
    offset: float = 0.0
    limit: float = 0.0
    """c > 0: before all else g is cut to at most c, and u to [-c, c] (gpt-oss)."""


class RoutingSpec(msgspec.Struct, frozen=True, kw_only=True):
    """From logits to the chosen experts and their weights."""

    n_chosen: int
    """k, of each token."""
    scores: Scores = Scores.SOFTMAX
    renormalise: bool = False
    """Weights of the chosen are divided by their sum."""
    scale: float = 1.0
    """Factor on the weights, at last."""
    n_groups: int = 1
    """Experts are divided into as many groups of neighbours."""
    n_chosen_groups: int = 1
    """Only experts of the best groups can be chosen; n_groups: of all."""
    n_group_best: int = 1
    """A group is as good as the sum of its best scores, of so many of them (1: DeepSeek-V2, 2: V3)."""
    mixer_margin: float = 0.0
    """m: with SPARSE_MIXER, s counts nothing beside the best score b where (b - s) / max(|s|, b) > m."""


class SharedExpert(msgspec.Struct, frozen=True, kw_only=True):
    """A feed-forward that every token goes through beside its experts. Gated, with `Gating` as by default."""

    size: int
    gated: bool = False
    """What it gives is times sigmoid(gate · x), gate being a vector."""


class ExpertsSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A feed-forward that is the sum over the chosen experts e of w_e * down_e(gating(gate_e(x), up_e(x)))."""

    n_experts: int
    size: int
    """Of one expert's inner vector."""
    routing: RoutingSpec
    gating: Gating = Gating()
    bias: bool = False
    """Of the matrices of experts."""
    router_bias: bool = False
    """Part of the logits."""
    correction_bias: bool = False
    """A float32 number for each expert, added to its score for the choice, not for the weight."""
    router_float32: bool = False
    """Logits are computed in float32, not in the model's dtype."""
    shared: SharedExpert | None = None

    @property
    def n_chosen(self) -> int:
        """Of each token."""
        return self.routing.n_chosen
