"""Adapters of many requests at once: each row of a step through the two small matrices of its own, added to a product.

Usable alone; imports nothing of Quire but `core` and sibling kernels.
"""

from quire.kernels.lora.op import add, add_packed
from quire.kernels.lora.weight import TILE, Groups, Packed, Stack, Tiles, groups_of, tiles_of

__all__ = ["TILE", "Groups", "Packed", "Stack", "Tiles", "add", "add_packed", "groups_of", "tiles_of"]
