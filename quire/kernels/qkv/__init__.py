"""From a layer's fused projection to attention's inputs: qk-norm, rotary embedding, keys and values into pages."""

from quire.kernels.qkv.op import rotate_and_store

__all__ = ["rotate_and_store"]
