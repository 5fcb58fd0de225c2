"""Page writes on CPU."""

from quire.kernels.kvstore.reference import copy_pages, store_kv

__all__ = ["copy_pages", "store_kv"]
