"""Gated activation on CPU."""

from quire.kernels.act.reference import silu_mul

__all__ = ["silu_mul"]
