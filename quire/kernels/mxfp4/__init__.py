"""Linear layers with weights of e2m1: in blocks of 32 with a power of two (MXFP4), or of 16 with an e4m3 (NVFP4)."""

from quire.kernels.mxfp4.op import linear, pack
from quire.kernels.mxfp4.weight import BLOCK, NV_BLOCK, Fp4Weight, layout

__all__ = ["BLOCK", "NV_BLOCK", "Fp4Weight", "layout", "linear", "pack"]
