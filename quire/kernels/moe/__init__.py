"""Mixtures of experts: which experts a token goes through, and what they give."""

from quire.kernels.moe.op import SWIGLU, build_rows, experts, gate, route

__all__ = ["SWIGLU", "build_rows", "experts", "gate", "route"]
