"""Linear layers with weights and activations of 8 bits: e4m3 or integers."""

from quire.kernels.w8a8.builds import ahead
from quire.kernels.w8a8.op import BLOCK, linear_fp8, linear_int8

__all__ = ["BLOCK", "ahead", "linear_fp8", "linear_int8"]
