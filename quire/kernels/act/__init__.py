"""Activations of the feed-forward, gated and plain."""

from quire.kernels.act.op import ACTIVATIONS, activate, sigmoid, silu_mul

__all__ = ["ACTIVATIONS", "activate", "sigmoid", "silu_mul"]
