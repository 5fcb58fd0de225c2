"""Root-mean-square normalisation, alone and fused with the residual addition."""

from quire.kernels.norm.op import add_rms_norm, rms_norm

__all__ = ["add_rms_norm", "rms_norm"]
