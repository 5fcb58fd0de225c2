"""Around attention to lines: lines normed, rotated and stored, what queries ask of lines, and values of what is seen."""

from quire.kernels.mla.op import ask, store, values

__all__ = ["ask", "store", "values"]
