"""Mixtures of experts: which experts a token goes through, and what they give."""

from quire.kernels.moe.op import experts, route

__all__ = ["experts", "route"]
