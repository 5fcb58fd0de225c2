"""Rotary position embedding, half-rotation (NeoX) style."""

from quire.kernels.rope.op import apply_rope

__all__ = ["apply_rope"]
