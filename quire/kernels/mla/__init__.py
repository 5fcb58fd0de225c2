"""From the projections of latent attention to its inputs: lines normed, rotated and stored, queries rotated."""

from quire.kernels.mla.op import store

__all__ = ["store"]
