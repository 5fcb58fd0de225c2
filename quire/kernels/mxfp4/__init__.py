"""Linear layers with weights of e2m1 in blocks of 32 with a power of two, as gpt-oss has them."""

from quire.kernels.mxfp4.op import linear, pack
from quire.kernels.mxfp4.weight import BLOCK, Fp4Weight, layout

__all__ = ["BLOCK", "Fp4Weight", "layout", "linear", "pack"]
