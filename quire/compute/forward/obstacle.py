"""Why the steps of a model are not one native call on a CPU, in words for who serves it.

Owns what a native step (`fused.py`) lacks. Does not own what it can do: each part of a model says whether it can be
recorded, and here is looked what about it cannot.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from quire.compute.layers.decoder_layer import DecoderLayer
from quire.compute.layers.experts import Experts
from quire.compute.layers.linear import Linear
from quire.compute.models.decoder import Decoder
from quire.compute.schemes.packed import PackedProduct
from quire.config.attention import AttentionSpec
from quire.config.experts import Gating
from quire.config.feed_forward import FeedForwardSpec
from quire.config.gated_attention import GatedAttentionSpec
from quire.config.latent import LatentAttentionSpec
from quire.config.layers import LayerSpec, NormKind, NormSpec, Placement
from quire.kernels import fused_step, native

_PLACES = {
    Placement.AFTER: "norms behind attention and feed-forward",
    Placement.BOTH: "norms both before and behind attention and feed-forward",
    Placement.PARALLEL: "attention and feed-forward side by side",
    Placement.SHARED: "attention and feed-forward side by side",
}


def obstacle(model: Decoder) -> str | None:
    """Why the steps of this model run operation by operation on this device, or None."""
    if native.library() is None:
        return native.explain().rstrip(".")
    if model.n_ranks > 1:
        return f"its layers are divided among {model.n_ranks} ranks, which wait for each other within every layer"
    if not model.is_whole:
        return "its layers are divided among the stages of a pipeline, so no process has a whole step"
    found = unpacked(model.linears())
    if found is not None:
        return found
    variants = [layer.mixer.variant for layer in model.layers]
    if not model.is_plain or any(one is None or not one.built_in for one in variants):
        lacking = dict.fromkeys(_lacking(model)) or ["other work between a product and its sum"]
        return f"the native step knows no {', no '.join(lacking)}"
    return fused_step.obstacle(model.dtype, model.arch.head_dim)


def unpacked(linears: Iterable[Linear]) -> str | None:
    """What is said of matrices that a native call does not multiply, or None."""
    kept = dict.fromkeys(one.scheme.name for one in linears if not isinstance(one.product, PackedProduct))
    return f"matrices that are kept as {', '.join(kept)} are multiplied from Python on a CPU" if kept else None


def _lacking(model: Decoder) -> Iterator[str]:
    """What it has and a native step has not, some of it several times."""
    arch = model.arch
    if arch.n_positions:
        yield "learned positions"
    if arch.embedding_scale != 1.0:
        yield "scaled embeddings"
    if arch.float32_stream:
        yield "residual stream in float32"
    for layer in model.layers:
        yield from _of_layer(layer)
    yield from _of_norm(model.norm.table.spec)
    if arch.logits_scale != 1.0:
        yield "scaled logits"
    if arch.logits_soft_cap:
        yield "soft cap on logits"


def _of_layer(layer: DecoderLayer) -> Iterator[str]:
    spec, variant = layer.spec, layer.mixer.variant
    if spec.placement in _PLACES:
        yield _PLACES[spec.placement]
    yield from _of_norm(spec.norm)
    if spec.residual_scale != 1.0:
        yield "scaled residual stream"
    if not layer.mixer.is_plain or variant is None or not variant.built_in:
        yield from _of_mixer(spec)
    if layer.ffn.sum.adds and not layer.ffn.is_plain:
        yield from _of_ffn(layer)


def _of_norm(spec: NormSpec) -> Iterator[str]:
    if spec.kind is not NormKind.RMS:
        yield "LayerNorm"
    elif not spec.weight:
        yield "norms without weights"


def _of_mixer(layer: LayerSpec) -> Iterator[str]:
    spec = layer.mixer
    if not isinstance(spec, AttentionSpec):
        kind = spec.words.partition(",")[0].partition(" of ")[0]
        yield "latent attention" if isinstance(spec, LatentAttentionSpec) else f"{kind} layers"
        return
    parts = {
        "gated attention": isinstance(spec, GatedAttentionSpec),
        "cut of queries, keys and values": spec.qkv_clip,
        "sinks in attention": spec.sinks,
        "ALiBi": spec.alibi,
        "soft cap on attention": spec.soft_cap,
    }
    found = [name for name, there in parts.items() if there]
    yield from found or ["such norms of queries and keys"]


def _of_ffn(layer: DecoderLayer) -> Iterator[str]:
    spec, ffn = layer.spec.ffn, layer.ffn
    if isinstance(spec, FeedForwardSpec):
        yield f"{'gated' if spec.gated else 'plain'} {spec.activation.value} feed-forward"
    elif not isinstance(ffn, Experts):
        yield "layers without a feed-forward"
    else:
        parts = {
            "gated shared expert": ffn.shared_gate is not None,
            "router in float32": ffn.is_wide,
            "experts without SwiGLU": ffn.spec.gating != Gating(),
            "experts that are divided among ranks": ffn.spec.n_held,
        }
        yield from [name for name, there in parts.items() if there] or ["experts whose matrices are packed unlike"]
