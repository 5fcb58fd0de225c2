"""A description in words: which parts a model was read as, for people. Torch-free.

Owns the sentences. Does not own the description (`arch`) nor what is printed where (`cli/doctor`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from quire.config.arch import ModelArch
from quire.config.layers import AttentionSpec, NormKind, NormSpec, Placement, QKNormScope
from quire.config.rope import Rope
from quire.core.units import format_bytes

BYTES: Final = {"bfloat16": 2, "float16": 2, "float32": 4}
PLACEMENTS: Final = {
    Placement.BEFORE: "before attention and before the feed-forward",
    Placement.AFTER: "after attention and after the feed-forward",
    Placement.BOTH: "before and after both attention and the feed-forward",
    Placement.PARALLEL: "before attention and before the feed-forward, which stand side by side",
    Placement.SHARED: "one before attention and the feed-forward, which stand side by side",
}
SCOPES: Final = {
    QKNormScope.HEAD: "each head with the same weights",
    QKNormScope.HEADS: "each head with its own weights",
    QKNormScope.APART: "each head with its own weights",
    QKNormScope.ALL: "all heads together",
}


def parts(arch: ModelArch) -> Iterator[tuple[str, str]]:
    """(name of a part, what it is), one for each kind of layer where layers differ."""
    layers, n_bytes = arch.layers, BYTES[arch.dtype]
    sizes = f"hidden size {arch.hidden_size:,}, vocabulary {arch.vocab_size:,}, context {arch.max_position:,}"
    yield "family", f"{arch.family}: {arch.n_layers} layers, {sizes}"
    yield from _by_layer("attention", (_mixer(layer.mixer) for layer in layers))
    yield from _by_layer("positions", (_positions(arch, layer.mixer) for layer in layers))
    yield from _by_layer("norms", (f"{_norm(layer.norm)}, {PLACEMENTS[layer.placement]}" for layer in layers))
    yield from _by_layer("feed-forward", (layer.ffn.words for layer in layers))
    yield "final norm", _norm(arch.norm)
    yield "head", ("the embedding" if arch.tie_embeddings else "of its own") + (", bias" if arch.head_bias else "")
    yield "multipliers", _multipliers(arch)
    yield "parameters", f"{arch.n_parameters:,}, {format_bytes(arch.n_parameters * n_bytes)} as {arch.dtype}"
    kv = sum(2 * layer.mixer.kv_size for layer in layers) * n_bytes
    yield "keys and values", f"{format_bytes(kv)} a token as {arch.dtype}, over all layers"


def _by_layer(name: str, texts: Iterable[str]) -> Iterator[tuple[str, str]]:
    layers: dict[str, list[int]] = {}
    for layer, text in enumerate(texts):
        layers.setdefault(text, []).append(layer)
    for text, numbers in layers.items():
        yield name, text if len(layers) == 1 else f"{text} (layers {_ranges(numbers)})"


def _ranges(numbers: list[int]) -> str:
    """Rising numbers, runs of them as first-last."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _mixer(mixer: AttentionSpec) -> str:
    found = [f"{mixer.n_heads} heads of {mixer.head_dim}", f"{mixer.n_kv_heads} of keys and values"]
    found += [f"window of {mixer.window:,} tokens" if mixer.window else "no window", f"scale {mixer.scale:.6g}"]
    biases = [name for name, there in (("q, k, v", mixer.qkv_bias), ("output", mixer.o_bias)) if there]
    found += [f"bias on {' and '.join(biases)}"] if biases else []
    if mixer.qk_norm is not None:
        found.append(f"q and k normed ({_norm(mixer.qk_norm.norm)}, {SCOPES[mixer.qk_norm.scope]})")
    found += [f"soft cap {mixer.soft_cap:g}"] if mixer.soft_cap else []
    found += [f"q, k, v cut to ±{mixer.qkv_clip:g}"] if mixer.qkv_clip else []
    return ", ".join(found)


def _positions(arch: ModelArch, mixer: AttentionSpec) -> str:
    found = [f"learned, {arch.n_positions:,} rows"] if arch.n_positions else []
    found += [_rope(mixer.rope, mixer.head_dim)] if mixer.rope is not None else []
    found += [f"ALiBi, slopes times {mixer.alibi:g}"] if mixer.alibi else []
    return ", ".join(found) or "none"


def _rope(rope: Rope, head_dim: int) -> str:
    found = f"rope of theta {rope.theta:,g}, type {rope.type}" + (f" by {rope.factor:g}" if rope.factor != 1 else "")
    rotary_dim = rope.rotary_dim(head_dim)
    return found + (f", {rotary_dim} of {head_dim} dimensions" if rotary_dim != head_dim else "")


def _norm(norm: NormSpec) -> str:
    found = ["RMS" if norm.kind is NormKind.RMS else "LayerNorm"] + (["1 + w"] if norm.offset else [])
    found += ([] if norm.weight else ["no weight"]) + (["bias"] if norm.bias else [])
    return f"{' with '.join((found[0], ' and '.join(found[1:]))) if found[1:] else found[0]}, epsilon {norm.eps:g}"


def _multipliers(arch: ModelArch) -> str:
    residuals = dict.fromkeys(layer.residual_scale for layer in arch.layers)
    factors = (("embedding", arch.embedding_scale), *(("residual", one) for one in residuals))
    found = [f"{name} {factor:.6g}" for name, factor in (*factors, ("logits", arch.logits_scale)) if factor != 1.0]
    found += [f"logits' soft cap {arch.logits_soft_cap:g}"] if arch.logits_soft_cap else []
    return ", ".join(found) or "none"
