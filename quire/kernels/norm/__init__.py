"""Root-mean-square normalisation, alone and fused with the residual addition, and LayerNorm."""

from quire.kernels.norm.op import add_rms_norm, layer_norm, rms_norm

__all__ = ["add_rms_norm", "layer_norm", "rms_norm"]
