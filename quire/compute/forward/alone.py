"""Whether a model's rows can be alone on a GPU (`kernels/invariance`): all that it runs must have such a kernel."""

from __future__ import annotations

from typing import Final

from quire.compute.models.decoder import Decoder
from quire.compute.runner.pool import KVPool
from quire.kernels.attention.hopper import launcher as attention
from quire.kernels.attention.schedule.large import INVARIANT_KEYS
from quire.kernels.gemm.hopper import static_obstacle
from quire.kernels.gemm.plan import ProductShape
from quire.kernels.hopper import machine_obstacle

MOST_WINDOW: Final = INVARIANT_KEYS // 2
MOST_WINDOW_DIM: Final = 128
"""Of wider heads a block of keys does not begin where a tile's may."""


def obstacle(model: Decoder, pool: KVPool) -> str:
    """Why the bits of a request would depend on its company; empty: they do not."""
    found = machine_obstacle()
    if found:
        return found
    if pool.k.dtype != model.dtype:
        return f"keys and values are {pool.k.dtype}: prompts are not read by the kernel whose sums are fixed"
    for kernel in model.kernels():
        found = static_obstacle(ProductShape(1, kernel.n, kernel.k, silu=kernel.silu_mul), model.dtype)
        if found:
            return found
    for layer in model.layers:
        if layer.mixer.not_alone or layer.ffn.not_alone:
            return layer.mixer.not_alone or layer.ffn.not_alone
        variant = layer.mixer.variant
        if variant is None:
            return "its layers have other mixers than attention"
        found = attention.shape_obstacle(pool.head_dim, pool.k.shape[3], variant, model.dtype)
        if found:
            return f"attention: {found}"
        if variant.window > MOST_WINDOW or (variant.window and pool.head_dim > MOST_WINDOW_DIM):
            return (
                f"a window of {variant.window} keys and heads of {pool.head_dim} are cut at places that depend on the "
                f"chunk: windows to {MOST_WINDOW} keys and heads to {MOST_WINDOW_DIM} are not"
            )
    return ""
