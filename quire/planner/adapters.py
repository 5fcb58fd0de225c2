"""What adapters take beside the model and their places on the device: the largest step's small products, and those that
the host keeps.

Owns both terms. Does not own places (`compute/adapters/places`) nor the equation (`memory`). An upper bound: each
adapter is of the largest rank in every matrix.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from quire.config.arch import ModelArch
from quire.config.experts import ExpertsSpec
from quire.config.parameters import Kept, Matrix, layer_parameters

FLOAT32_BYTES: Final = 4
LINES, OUTPUTS = 16, 64
"""In a tile of the first product on a CPU, and of the second (`kernels/lora/places`)."""
MOST_SUMS, SUM_INPUTS = 16, 1024
"""Parts into which a GPU's first product divides its sum at most, inputs of each at least (`kernels/lora/triton`)."""


def adaptable(arch: ModelArch, *, with_experts: bool = False) -> Iterator[Matrix]:
    """The matrices that adapters may add to."""
    for number, spec in enumerate(arch.layers):
        for matrix in layer_parameters(spec, arch.hidden_size, number).matrices:
            if (with_experts or not matrix.bank) and matrix.kept is Kept.BY_SCHEME:
                yield matrix


def kept_bytes(arch: ModelArch, rank: int, itemsize: int, *, with_experts: bool = False) -> int:
    """Of one adapter on a CPU, which lays matrices out in tiles of outputs."""

    def of_matrix(one: Matrix) -> int:
        outputs = sum(_tiled(rows, OUTPUTS) for _, rows in one.parts)
        return _tiled(len(one.parts) * rank, LINES) * one.n_in + outputs * rank

    return itemsize * sum(map(of_matrix, adaptable(arch, with_experts=with_experts)))


def _tiled(n_out: int, n_each: int) -> int:
    return -(-n_out // n_each) * n_each


def row_bytes(arch: ModelArch, rank: int, itemsize: int, *, in_main: bool, with_experts: bool = False) -> int:
    """Of one row of a step, of the matrix with most. in_main: on a CPU the normed row, what lies between both products
    in float32, and gates with ups; on a GPU the second, for each part of the sum. Experts have a row for each that a
    token chose, which is copied, and what is added to it."""

    def of_matrix(one: Matrix) -> int:
        inner = len(one.parts) * rank
        if in_main:
            return itemsize * (one.n_in + one.n_out) + inner * FLOAT32_BYTES
        return max(1, min(MOST_SUMS, one.n_in // SUM_INPUTS)) * (inner + 1) * FLOAT32_BYTES

    found = [of_matrix(one) for one in adaptable(arch)]
    for spec in arch.layers if with_experts else ():
        if isinstance(spec.ffn, ExpertsSpec):
            banks = {one.bank: one for one in spec.ffn.parameters("", arch.hidden_size).matrices.values() if one.bank}
            each = (of_matrix(one) + itemsize * (one.n_in + one.n_out) * (not in_main) for one in banks.values())
            found.append(spec.ffn.routing.n_chosen * max(each))
    return max(found, default=0)
