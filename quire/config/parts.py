"""A description in words: which parts a model was read as, for people. Torch-free.

Owns the sentences. Does not own the description (`arch`) nor what is printed where (`cli/doctor`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from quire.config.arch import ModelArch
from quire.config.layers import MixerSpec, Placement
from quire.core.units import format_bytes

BYTES: Final = {"bfloat16": 2, "float16": 2, "float32": 4}
PLACEMENTS: Final = {
    Placement.BEFORE: "before attention and before the feed-forward",
    Placement.AFTER: "after attention and after the feed-forward",
    Placement.BOTH: "before and after both attention and the feed-forward",
    Placement.PARALLEL: "before attention and before the feed-forward, which stand side by side",
    Placement.SHARED: "one before attention and the feed-forward, which stand side by side",
}


def parts(arch: ModelArch) -> Iterator[tuple[str, str]]:
    """(name of a part, what it is), one for each kind of layer where layers differ."""
    layers, n_bytes = arch.layers, BYTES[arch.dtype]
    sizes = f"hidden size {arch.hidden_size:,}, vocabulary {arch.vocab_size:,}, context {arch.max_position:,}"
    yield "family", f"{arch.family}: {arch.n_layers} layers, {sizes}"
    yield from _by_layer("attention", (layer.mixer.words for layer in layers))
    yield from _by_layer("positions", (_positions(arch, layer.mixer) for layer in layers))
    yield from _by_layer("norms", (f"{layer.norm.words}, {PLACEMENTS[layer.placement]}" for layer in layers))
    yield from _by_layer("feed-forward", (layer.ffn.words for layer in layers))
    yield "final norm", arch.norm.words
    yield "head", ("the embedding" if arch.tie_embeddings else "of its own") + (", bias" if arch.head_bias else "")
    yield "multipliers", _multipliers(arch)
    if arch.codings is not None:
        yield "quantised", arch.codings.words
    yield "parameters", f"{arch.n_parameters:,}, {format_bytes(arch.n_parameters * n_bytes)} as {arch.dtype}"
    kv = sum(spec.numbers for spec in arch.kv_specs.values()) * n_bytes
    yield "keys and values", f"{format_bytes(kv)} a token as {arch.dtype}, over all layers"
    states = sum(spec.n_bytes(n_bytes) for spec in arch.state_specs.values())
    if states:
        yield "states", f"{format_bytes(states)} a sequence, over all layers"


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


def _positions(arch: ModelArch, mixer: MixerSpec) -> str:
    found = [f"learned, {arch.n_positions:,} rows"] if arch.n_positions else []
    return ", ".join([*found, *mixer.position_words]) or "none"


def _multipliers(arch: ModelArch) -> str:
    residuals = dict.fromkeys(layer.residual_scale for layer in arch.layers)
    factors = (("embedding", arch.embedding_scale), *(("residual", one) for one in residuals))
    found = [f"{name} {factor:.6g}" for name, factor in (*factors, ("logits", arch.logits_scale)) if factor != 1.0]
    found += [f"logits' soft cap {arch.logits_soft_cap:g}"] if arch.logits_soft_cap else []
    return ", ".join(found) or "none"
