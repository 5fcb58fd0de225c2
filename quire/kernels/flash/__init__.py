"""Dense attention with gradients: training, and long context without a cache."""

from quire.kernels.flash.op import flash_attention

__all__ = ["flash_attention"]
