"""Linear layers as one launch: product, norm before it, activation or residual after it."""

from quire.kernels.around import Norm
from quire.kernels.gemm.ahead import Coded, LinearShape, build
from quire.kernels.gemm.op import linear, obstacle

__all__ = ["Coded", "LinearShape", "Norm", "build", "linear", "obstacle"]
