"""In what numbers weights, keys and values are kept, by name: bytes of a matrix, and which rate its products have.

Owns the table and its arithmetic. Does not own how a scheme rounds (`compute/schemes`, `kernels/qgemm`).
"""

from __future__ import annotations

from typing import Final, Protocol

import msgspec

from quire.config.parameters import Kept, Matrix
from quire.core.errors import ConfigError, shown
from quire.core.spelling import did_you_mean_and_known


class WeightFormat(msgspec.Struct, frozen=True, kw_only=True):
    """How a matrix is kept."""

    name: str
    bits: int
    group: int = 0
    """Inputs that share a scale; 0: all of an output channel."""
    scale_bytes: int = 0
    products: str = "bfloat16"
    """In which type a device multiplies it: what its peak is looked up by."""
    of_experts: bool = False
    """Matrices of experts are kept so, and all else as a checkpoint in bfloat16 has it."""

    def n_bytes(self, n_out: int, n_in: int) -> float:
        """Of a matrix, scales counted in."""
        n_scales = n_out * -(-n_in // self.group) if self.group else n_out
        return n_out * n_in * self.bits / 8 + n_scales * self.scale_bytes

    @property
    def is_rounded(self) -> bool:
        """Whether it has fewer bits than a checkpoint in bfloat16."""
        return self.bits < 16


FORMATS: Final = {
    one.name: one
    for one in (
        WeightFormat(name="bfloat16", bits=16),
        WeightFormat(name="float16", bits=16),
        WeightFormat(name="float32", bits=32, products="float32"),
        WeightFormat(name="fp8", bits=8, scale_bytes=4, products="fp8"),
        WeightFormat(name="fp8-block128", bits=8, group=16384, scale_bytes=4, products="fp8"),
        WeightFormat(name="int8", bits=8, scale_bytes=4, products="int8"),
        WeightFormat(name="int8-g32", bits=8, group=32, scale_bytes=2, products="int8"),
        WeightFormat(name="int4", bits=4, group=64, scale_bytes=2, products="int8"),
        WeightFormat(name="int4-g32", bits=4, group=32, scale_bytes=2, products="int8"),
        WeightFormat(name="int4-g128", bits=4, group=128, scale_bytes=2, products="int8"),
        WeightFormat(name="mxfp4", bits=4, group=32, scale_bytes=1, of_experts=True),
        WeightFormat(name="nvfp4", bits=4, group=16, scale_bytes=1),
    )
}
"""Name → format. int8 and int4 are those of `--quantization`; the others are what published checkpoints have: MXFP4 is
that of gpt-oss, whose experts alone are rounded."""
KV_ITEMSIZES: Final = {"bfloat16": 2.0, "float16": 2.0, "float32": 4.0, "fp8": 1.0, "int8": 1.0}
FLOATING: Final = ("bfloat16", "float16", "float32")
"""Of both: numbers that are not rounded."""
INT8_SCALE_BYTES: Final = 4
"""Beside the keys, or values, of 8 bits of each token and head."""


def kv_number_bytes(kv: str, head_dim: int) -> float:
    """Bytes a number in a KV cache of this type, a key of `KV_ITEMSIZES`, scales counted in."""
    return 1 + INT8_SCALE_BYTES / head_dim if kv == "int8" else KV_ITEMSIZES[kv]


class OwnFormats(Protocol):
    """Of a checkpoint that is quantised, on one kind of device."""

    @property
    def head(self) -> WeightFormat | None:
        """Of the output head; None: as it is where nothing is rounded."""

    def of(self, matrix: Matrix) -> WeightFormat | None:
        """Of a layer's matrix that may be rounded; None: it is not."""


class Formats(msgspec.Struct, frozen=True, kw_only=True):
    """Of one engine."""

    weights: WeightFormat = FORMATS["bfloat16"]
    kv: str = "bfloat16"
    itemsize: int = 2
    """Bytes an activation, a norm, an embedding, and what is never rounded."""
    coded: OwnFormats | None = None
    """What a quantised checkpoint has each matrix in, of which `weights` is the most; None: all are in `weights`."""

    def kept(self, matrix: Matrix) -> WeightFormat:
        """How a matrix is kept."""
        if matrix.kept is Kept.FLOAT32:
            return FORMATS["float32"]
        if self.coded is not None and matrix.kept is Kept.BY_SCHEME:
            return self.coded.of(matrix) or self.floating
        is_whole = matrix.kept is Kept.FLOATING or (self.weights.of_experts and not matrix.bank)
        return self.floating if is_whole else self.weights

    @property
    def floating(self) -> WeightFormat:
        """Of matrices that are not rounded."""
        return FORMATS["bfloat16" if self.itemsize == 2 else "float32"]

    @property
    def head(self) -> WeightFormat:
        """Of the output head."""
        if self.coded is not None:
            return self.coded.head or self.floating
        return self.floating if self.weights.of_experts else self.weights

    def kv_itemsize(self, head_dim: int) -> float:
        """Bytes a number in the KV cache, scales counted in."""
        return kv_number_bytes(self.kv, head_dim)


def formats_named(weights: str, kv: str = "auto", dtype: str = "bfloat16") -> Formats:
    """By names; 'auto' is the model's type, `dtype`, or that of weights that are not rounded, as `--dtype` has it.
    ConfigError with the nearest for an unknown one."""
    if weights in FORMATS and not FORMATS[weights].is_rounded:
        dtype = weights
    weights, kv = (dtype if name == "auto" else name for name in (weights, kv))
    for flag, name, known in (("--weights", weights, FORMATS), ("--kv-cache-dtype", kv, KV_ITEMSIZES)):
        if name not in known:
            raise ConfigError(f"{flag} {shown(name)} is unknown{did_you_mean_and_known(name, known)}")
    return Formats(weights=FORMATS[weights], kv=kv, itemsize=4 if dtype == "float32" else 2)
