"""Activations of the feed-forward, gated and plain."""

from quire.kernels.act.op import ACTIVATIONS, activate, silu_mul

__all__ = ["ACTIVATIONS", "activate", "silu_mul"]
