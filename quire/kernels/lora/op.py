"""Public products with adapters. Checks shapes and picks the implementation."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from quire.kernels import around
from quire.kernels.catalog import Slower
from quire.kernels.gemm import Norm
from quire.kernels.lora import hopper
from quire.kernels.lora.places import Places
from quire.kernels.lora.weight import Stack, Tiles
from quire.kernels.selector import missed, select


def add(
    x: torch.Tensor, stack: Stack, tiles: Tiles, y: torch.Tensor, norm: Norm | None = None,
    activated: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """y[row] += B (A f(x[row])) of the row's adapter (Hu et al. 2021, section 4.1), f an RMS norm or nothing.

    x: [n, k], y: [n, outputs], both of the stack's dtype with contiguous rows; norm: (weight [k], eps). Rows without an
    adapter are neither read nor written; a row's result does not depend on the other rows, bit for bit. Nothing is read
    by the host, so that it can be captured. activated: [n, outputs / 2], contiguous, of a stack of two equal parts:
    becomes `act.silu_mul` of y with what is added, of all rows, bit for bit; then y is void. Raises ValueError on a
    mismatch.
    """
    _check_stack(x, stack, tiles)
    _check(x, y, stack.a.shape[2], sum(stack.sizes), norm)
    if activated is not None:
        if len(stack.sizes) != 2 or stack.sizes[0] != stack.sizes[1]:
            raise ValueError(f"parts of {stack.sizes} are no gates and as many ups to activate")
        if activated.shape != (len(x), stack.sizes[0]) or activated.dtype != x.dtype or not activated.is_contiguous():
            raise ValueError(f"activated {tuple(activated.shape)} must be {(len(x), stack.sizes[0])} {x.dtype}")
    select("lora", "add", x)(x, stack, tiles, y, norm, activated)


def prepare_linear(
    x: torch.Tensor, w: torch.Tensor, stack: Stack, tiles: Tiles, bias: torch.Tensor | None, norm: Norm | None,
    residual: torch.Tensor | None, silu_mul: bool, out: torch.Tensor | None,
) -> Callable[..., torch.Tensor] | str:  # fmt: skip
    """`gemm.linear` of w and what `add` would add to it, before activation and residual, ready to be called with these
    arguments; or why it is not one product here, and is to be done by those two. A loss is said once, to the log.

    A row without an adapter gets the bits of `gemm.linear`. What is added is rounded with the product, not after it;
    it does not depend on the other rows, nor on their places. The first call for new shapes may compile (seconds).
    Raises ValueError on a mismatch.
    """
    if not x.is_cuda:
        return Slower(f"tensors are on {x.device}")
    _check_stack(x, stack, tiles)
    around.check(x, (sum(stack.sizes), stack.a.shape[2]), bias, norm, residual, silu_mul, out)
    if w.shape != (sum(stack.sizes), x.shape[1]) or w.dtype != x.dtype or not w.is_contiguous():
        raise ValueError(f"w {tuple(w.shape)} {w.dtype} must be {(sum(stack.sizes), x.shape[1])} of {x.dtype}")
    found = hopper.prepare(x, w, stack, tiles, bias, norm, residual, silu_mul, out)
    if isinstance(found, str):
        missed("lora", "hopper", found, "triton")
    return found


def add_lines(x: torch.Tensor, adapters: Places, places: np.ndarray, y: torch.Tensor, norm: Norm | None = None) -> None:
    """The same on a CPU, of adapters each by itself. places: int [n], of each row, -1: none.

    Raises ValueError on a mismatch.
    """
    n, k = adapters.shape
    _check(x, y, k, n, norm)
    if places.shape != (len(x),):
        raise ValueError(f"places {places.shape} must be {(len(x),)}")
    if len(places) and int(places.max()) >= len(adapters):
        raise ValueError(f"place {int(places.max())} is not one of {len(adapters)}")
    select("lora", "add_lines", x)(x, adapters, places, y, norm)


def _check_stack(x: torch.Tensor, stack: Stack, tiles: Tiles) -> None:
    n_places, rows, _ = stack.a.shape
    if rows != stack.most * len(stack.sizes) or stack.b.shape != (n_places, sum(stack.sizes), stack.most):
        raise ValueError(f"a {tuple(stack.a.shape)} and b {tuple(stack.b.shape)} do not fit parts of {stack.sizes}")
    if stack.ranks.shape != (n_places, len(stack.sizes)):
        raise ValueError(f"ranks {tuple(stack.ranks.shape)} must be {(n_places, len(stack.sizes))}")
    if stack.a.dtype != x.dtype or stack.b.dtype != x.dtype or len(tiles.order) < len(x):
        raise ValueError(f"a {stack.a.dtype} and b {stack.b.dtype} must be {x.dtype}, and {len(x)} rows in order")


def _check(x: torch.Tensor, y: torch.Tensor, k: int, n: int, norm: Norm | None) -> None:
    if x.dim() != 2 or x.shape[1] != k or x.stride(1) != 1:
        raise ValueError(f"x {tuple(x.shape)} with strides {x.stride()} does not fit k = {k}")
    if y.shape != (len(x), n) or y.dtype != x.dtype or y.stride(1) != 1:
        raise ValueError(f"y {tuple(y.shape)} {y.dtype} must be {(len(x), n)} {x.dtype} with contiguous rows")
    if norm is not None and (norm[0].shape != (k,) or norm[0].dtype != x.dtype):
        raise ValueError(f"norm {tuple(norm[0].shape)} {norm[0].dtype} does not fit x {tuple(x.shape)} {x.dtype}")
