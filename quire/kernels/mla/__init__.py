"""Around attention to lines: lines normed, rotated and stored, what queries ask of lines, values of what is seen."""

from quire.kernels.mla.op import ask, attend, store, values

__all__ = ["ask", "attend", "store", "values"]
