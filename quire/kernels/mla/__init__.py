"""Around attention to lines: they are normed, rotated and stored, what queries ask of them, values of what is seen."""

from quire.kernels.mla.op import ask, store, values

__all__ = ["ask", "store", "values"]
