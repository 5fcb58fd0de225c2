"""Experts whose matrices are packed for the CPU kernels, each by itself (`kernels/qgemm`): one call for all of them."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence

import torch

from quire.kernels.qgemm import PackedWeight
from quire.kernels.qgemm.cpu import NativeMatrix, matrix
from quire.kernels.selector import select

Biases = Sequence[torch.Tensor] | None


class PackedExperts:
    """The matrices of all experts of a layer; those of one product are of one scheme and size. Not to be changed."""

    def __init__(
        self,
        up: Sequence[PackedWeight],
        down: Sequence[PackedWeight],
        up_biases: Biases = None,
        down_biases: Biases = None,
    ) -> None:
        """up: of each expert [2 * inner, hidden], gates first; down: [hidden, inner]; biases: contiguous.

        Raises ValueError on a mismatch.
        """
        self.up, self.down, self.up_biases, self.down_biases = up, down, up_biases, down_biases
        if len(up) != len(down) or not up:
            raise ValueError(f"there are {len(up)} matrices of the first product and {len(down)} of the second")
        for product in (up, down):
            kinds = {(one.scheme, one.n, one.k) for one in product}
            if len(kinds) > 1:
                raise ValueError(f"matrices of one product are of several kinds: {sorted(kinds)}")
        if up[0].k != down[0].n or up[0].n != 2 * down[0].k:
            raise ValueError(f"[{up[0].n}, {up[0].k}] and [{down[0].n}, {down[0].k}] are not of one expert")

    @functools.cached_property
    def native(self) -> tuple[ctypes.Array[NativeMatrix], ctypes.Array[NativeMatrix]]:
        """Both products' matrices as C sees them."""
        return _array(self.up, self.up_biases), _array(self.down, self.down_biases)


def _array(product: Sequence[PackedWeight], biases: Biases) -> ctypes.Array[NativeMatrix]:
    each: Sequence[torch.Tensor | None] = biases or [None] * len(product)
    made = [matrix(one, bias) for one, bias in zip(product, each, strict=True)]
    return (NativeMatrix * len(made))(*made)


def packed_experts(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
    matrices: PackedExperts,
    *,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """What `experts` computes with SwiGLU, from packed matrices on the CPU.

    x, expert_ids, weights, residual: as in `experts`. Products round x and what lies between them as `qgemm.linear`
    does, each expert's output to x's dtype; the sum over experts is in float32, in the order of the ids. A row's result
    does not depend on the other rows or on the number of threads, bit for bit. Raises ValueError on a mismatch.
    """
    if x.dim() != 2 or x.shape[1] != matrices.up[0].k or x.stride(1) != 1:
        raise ValueError(f"x {tuple(x.shape)} does not fit experts of {matrices.up[0].k} columns")
    if expert_ids.shape != weights.shape or expert_ids.dim() != 2 or len(expert_ids) != len(x):
        raise ValueError(f"expert_ids {tuple(expert_ids.shape)} and weights {tuple(weights.shape)} must be [n, k]")
    if expert_ids.dtype != torch.int32 or weights.dtype != torch.float32:
        raise ValueError(f"expert_ids {expert_ids.dtype} must be int32, and weights {weights.dtype} float32")
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype or residual.stride(1) != 1):
        raise ValueError(f"residual {tuple(residual.shape)} {residual.dtype} must be as x {tuple(x.shape)} {x.dtype}")
    arguments = (x, expert_ids, weights, matrices, residual)
    y: torch.Tensor = select("moe", "packed_experts", *arguments)(*arguments)
    return y
