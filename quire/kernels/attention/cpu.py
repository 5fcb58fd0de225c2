"""Attention on CPU."""

from quire.kernels.attention.reference import run, tiles

__all__ = ["run", "tiles"]
