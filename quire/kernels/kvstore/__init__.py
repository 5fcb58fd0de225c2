"""Writing keys and values into pages, and copying pages."""

from quire.kernels.kvstore.op import copy_pages, store_kv

__all__ = ["copy_pages", "store_kv"]
