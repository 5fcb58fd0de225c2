"""Mixtures of experts: which experts a token goes through, and what they give."""

from quire.kernels.moe.adapted import ExpertAdapters, adapted_experts
from quire.kernels.moe.coded import CodedMatrices, Codes, Matrices
from quire.kernels.moe.op import SWIGLU, build_rows, choose, experts, experts_with_shared, gate, route
from quire.kernels.moe.packed import PackedExperts, packed_experts

__all__ = [
    "SWIGLU", "CodedMatrices", "Codes", "ExpertAdapters", "Matrices", "PackedExperts", "adapted_experts", "build_rows",
    "choose", "experts", "experts_with_shared", "gate", "packed_experts", "route",
]  # fmt: skip
