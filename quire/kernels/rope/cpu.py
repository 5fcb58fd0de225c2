"""Rotary embedding on CPU."""

from quire.kernels.rope.reference import apply_rope

__all__ = ["apply_rope"]
