"""Adapters of many requests at once: each row of a step through the two small matrices of its own, added to a product.

Usable alone; imports nothing of Quire but `core` and sibling kernels.
"""

from quire.kernels.lora.hopper import variant_of
from quire.kernels.lora.op import add, add_lines, prepare_linear
from quire.kernels.lora.places import Lines, Part, Places
from quire.kernels.lora.weight import FUSED_RANKS, TILE, Stack, Tiles, tiles_of

__all__ = [
    "FUSED_RANKS",
    "TILE",
    "Lines",
    "Part",
    "Places",
    "Stack",
    "Tiles",
    "add",
    "add_lines",
    "prepare_linear",
    "tiles_of",
    "variant_of",
]
