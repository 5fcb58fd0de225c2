"""Whether a model's rows can be alone on a GPU (`kernels/invariance`): all that it runs must have such a kernel."""

from __future__ import annotations

from typing import Final

import torch

from quire.compute.layers.decoder_layer import DecoderLayer
from quire.compute.layers.experts import Experts
from quire.compute.models.decoder import Decoder
from quire.compute.runner.pool import KVPool
from quire.compute.schemes.plain import PlainProduct
from quire.config.latent import LatentAttentionSpec
from quire.kernels.attention.hopper import latent, launcher
from quire.kernels.attention.schedule.large import INVARIANT_KEYS
from quire.kernels.attention.schedule.tiles import small_rows_of
from quire.kernels.catalog import triton_obstacle
from quire.kernels.gemm.hopper import static_obstacle
from quire.kernels.gemm.plan import CHUNK, ProductShape
from quire.kernels.hopper import machine_obstacle
from quire.kernels.moe import hopper_router

MOST_WINDOW: Final = INVARIANT_KEYS // 2
MOST_WINDOW_DIM: Final = 128
"""Of wider heads a block of keys does not begin where a tile's may."""


def obstacle(model: Decoder, pool: KVPool) -> str:
    """Why the bits of a request would depend on its company; empty: they do not."""
    found = machine_obstacle() or triton_obstacle() or static_obstacle(ProductShape(1, CHUNK, CHUNK), model.dtype)
    if found:
        return found
    if pool.layout.n_lanes and pool.k.dtype != model.dtype:
        return f"keys and values are {pool.k.dtype}: prompts are not read by the kernel whose sums are fixed"
    for layer in model.layers:
        if found := _of_experts(layer) or _of_attention(layer, model, pool):
            return found
    return ""


def _of_experts(layer: DecoderLayer) -> str:
    """Of its router, if it multiplies in float32: for those in the model's type there are products of any size."""
    if not isinstance(layer.ffn, Experts) or not layer.ffn.is_wide:
        return ""
    router = layer.ffn.router.run
    if not isinstance(router, PlainProduct):
        return "its routers multiply in float32, with torch"
    x = torch.empty(1, router.weight.shape[1], dtype=layer.ffn.dtype, device=router.weight.device)
    found = hopper_router.static_obstacle(x, router.weight, None, layer.ffn.spec.routing, None, None)
    return f"its routers multiply in float32, with torch: {found}" if found else ""


def _of_attention(layer: DecoderLayer, model: Decoder, pool: KVPool) -> str:
    """Recurrent layers have none."""
    variant, page_size = layer.mixer.variant, pool.k.shape[3]
    if variant is None:
        return ""
    if isinstance(layer.spec.mixer, LatentAttentionSpec):
        found = latent.shape_obstacle(pool.n_heads, pool.head_dim, pool.value_dim, page_size, variant, model.dtype)
    else:
        found = launcher.shape_obstacle(pool.head_dim, page_size, variant, model.dtype)
    if not found and pool.group > small_rows_of(pool.group):
        found = f"{pool.group} query heads of a KV head are more than the {small_rows_of(pool.group)} rows of a tile"
    if found:
        return f"attention: {found}"
    if variant.window > MOST_WINDOW or (variant.window and pool.head_dim > MOST_WINDOW_DIM):
        return (
            f"a window of {variant.window} keys and heads of {pool.head_dim} are cut at places that depend on the "
            f"chunk: windows to {MOST_WINDOW} keys and heads to {MOST_WINDOW_DIM} are not"
        )
    return ""
