"""Linear layers on the CPU with packed weights: of 8 or 4 bits, activations then rounded to 8 bits, or floating."""

from quire.kernels.qgemm.arena import arena
from quire.kernels.qgemm.op import linear, pack, pack_floats
from quire.kernels.qgemm.weight import SCHEMES, PackedWeight

__all__ = ["SCHEMES", "PackedWeight", "arena", "linear", "pack", "pack_floats"]
