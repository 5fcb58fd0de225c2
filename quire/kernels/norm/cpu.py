"""RMS norm on CPU."""

from quire.kernels.norm.reference import add_rms_norm, rms_norm

__all__ = ["add_rms_norm", "rms_norm"]
