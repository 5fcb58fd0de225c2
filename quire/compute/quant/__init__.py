"""Quantised weights of a model: which layers a scheme changes, and what their products become."""

from quire.compute.quant.scheme import SCHEMES, Product, Quantize, QuantScheme

__all__ = ["SCHEMES", "Product", "QuantScheme", "Quantize"]
