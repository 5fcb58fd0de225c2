"""Linear layers with weights of 4 bits in groups and activations of the model's dtype."""

from quire.kernels.w4a16.hopper import ahead
from quire.kernels.w4a16.op import linear, pack
from quire.kernels.w4a16.weight import Int4Weight, layout

__all__ = ["Int4Weight", "ahead", "layout", "linear", "pack"]
