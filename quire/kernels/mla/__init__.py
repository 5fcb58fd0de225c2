"""From the projections of latent attention to attention's inputs: the norm and rotation of lines, and these into pages."""

from quire.kernels.mla.op import store

__all__ = ["store"]
