"""What adapters take beside the model and their places on the device: the largest step's small products, and those that
the host keeps.

Owns both terms. Does not own places (`compute/adapters/bank`) nor the equation (`memory`). An upper bound: each adapter
is of the largest rank in every matrix.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from quire.config.arch import ModelArch
from quire.config.parameters import Kept, Matrix, layer_parameters

FLOAT32_BYTES: Final = 4
TILE: Final = 64
"""Of the CPU's kernels (`kernels/qgemm`)."""
MOST_SUMS, SUM_INPUTS = 16, 512
"""Parts into which a GPU's first product divides its sum at most, inputs of each at least (`kernels/lora/triton`)."""


def adaptable(arch: ModelArch) -> Iterator[Matrix]:
    """The matrices that adapters may add to."""
    for number, spec in enumerate(arch.layers):
        for matrix in layer_parameters(spec, arch.hidden_size, number).matrices:
            if not matrix.bank and matrix.kept is Kept.BY_SCHEME:
                yield matrix


def kept_bytes(arch: ModelArch, rank: int, itemsize: int) -> int:
    """Of one adapter on a CPU, which lays matrices out in tiles of outputs."""

    def of_matrix(one: Matrix) -> int:
        return _tiled(len(one.parts) * rank) * one.n_in + sum(_tiled(rows) for _, rows in one.parts) * rank

    return itemsize * sum(map(of_matrix, adaptable(arch)))


def _tiled(n_out: int) -> int:
    return -(-n_out // TILE) * TILE


def row_bytes(arch: ModelArch, rank: int, itemsize: int, *, in_main: bool) -> int:
    """Of one row of a step, of the matrix with most. in_main: on a CPU rows of an adapter are copied together, and what
    lies between both products is of the model's type; on a GPU it is float32, for each part of the sum."""

    def of_matrix(one: Matrix) -> int:
        inner = len(one.parts) * rank
        if in_main:
            return itemsize * (one.n_in + one.n_out + inner)
        return max(1, min(MOST_SUMS, one.n_in // SUM_INPUTS)) * (inner + 1) * FLOAT32_BYTES

    return max(map(of_matrix, adaptable(arch)), default=0)
