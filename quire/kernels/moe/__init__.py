"""Mixtures of experts: which experts a token goes through, and what they give."""

from quire.kernels.moe.op import SWIGLU, experts, gate, route
from quire.kernels.moe.packed import PackedExperts, packed_experts

__all__ = ["SWIGLU", "PackedExperts", "experts", "gate", "packed_experts", "route"]
