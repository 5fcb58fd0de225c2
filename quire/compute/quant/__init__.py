"""Quantised weights of a model: which layers a scheme changes, and what their products become."""

from quire.compute.quant.scheme import SCHEMES, PackedProduct, Product, Quantize, Rounded

__all__ = ["SCHEMES", "PackedProduct", "Product", "Quantize", "Rounded"]
