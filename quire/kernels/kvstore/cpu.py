"""Copies of pages on CPU: they are rare and stay the reference's slice assignments."""

from __future__ import annotations

from quire.kernels.kvstore.reference import copy_pages

__all__ = ["copy_pages"]
