"""Gated activation of the feed-forward layer."""

from quire.kernels.act.op import silu_mul

__all__ = ["silu_mul"]
