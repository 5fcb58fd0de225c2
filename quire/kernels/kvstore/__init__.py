"""Copying pages of keys and values."""

from quire.kernels.kvstore.op import copy_pages

__all__ = ["copy_pages"]
