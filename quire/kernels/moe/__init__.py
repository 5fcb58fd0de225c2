"""Mixtures of experts: which experts a token goes through, and what they give."""

from quire.kernels.moe.adapted import ExpertAdapters, adapted_experts
from quire.kernels.moe.ahead import Following
from quire.kernels.moe.coded import CodedMatrices, Codes, Matrices
from quire.kernels.moe.op import (
    SWIGLU,
    build_rows,
    choose,
    experts,
    experts_with_shared,
    gate,
    norm_and_choose,
    route,
)
from quire.kernels.moe.packed import PackedExperts, packed_experts

__all__ = [
    "SWIGLU", "CodedMatrices", "Codes", "ExpertAdapters", "Following", "Matrices", "PackedExperts", "adapted_experts",
    "build_rows", "choose", "experts", "experts_with_shared", "gate", "norm_and_choose", "packed_experts", "route",
]  # fmt: skip
