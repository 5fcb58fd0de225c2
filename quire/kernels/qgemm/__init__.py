"""Linear layers on the CPU with weights of 8 or 4 bits and activations quantised to 8 bits in the call."""

from quire.kernels.qgemm.op import linear, pack
from quire.kernels.qgemm.weight import SCHEMES, PackedWeight, Scheme

__all__ = ["SCHEMES", "PackedWeight", "Scheme", "linear", "pack"]
