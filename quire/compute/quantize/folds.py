"""Where a factor of a matrix's inputs can go before it: into the norm, or the rows of the matrix, that they come from.

Owns which parts of a layer allow it: norms with weights before attention, feed-forwards and experts; the values of
attention before its last product; what a gated feed-forward multiplies its activation by. Other matrices have no fold.
Invariant: a fold leaves what the layer computes as it is, but for rounding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

from quire.compute.layers.attention import Attention
from quire.compute.layers.decoder_layer import DecoderLayer
from quire.compute.layers.experts import Experts
from quire.compute.layers.feed_forward import FeedForward, Ffn
from quire.compute.layers.linear import Linear
from quire.compute.layers.norm import Norm
from quire.compute.quantize.watched import matrix_of
from quire.config.layers import Placement
from quire.kernels import moe


@dataclasses.dataclass(frozen=True, slots=True)
class Fold:
    """Inputs that come from one place."""

    readers: tuple[Linear, ...]
    """All that read them; the first sees every row."""
    tensors: tuple[torch.Tensor, ...]
    """What makes them, by rows: they are divided by the factors."""
    repeats: tuple[int, int] = (1, 1)
    """(n, size): n neighbouring runs of `size` inputs are made by the same rows: heads that share values."""

    def shared(self, magnitudes: torch.Tensor) -> torch.Tensor:
        """[k] → the same, with the mean where inputs come from the same rows."""
        runs = self._runs(magnitudes)
        return runs.mean(1, keepdim=True).expand_as(runs).flatten()

    def apply(self, factors: torch.Tensor) -> None:
        """factors: [k], as `shared` made them alike: readers times, what is before them over the factors."""
        for reader in self.readers:
            matrix_of(reader).mul_(factors)
        own = self._runs(factors)[:, 0].flatten()
        for tensor in self.tensors:
            tensor.div_(own.view(-1, *[1] * (tensor.dim() - 1)))

    def _runs(self, values: torch.Tensor) -> torch.Tensor:
        """[k] → [k / (n * size), n, size]."""
        n, size = self.repeats
        return values.view(-1, n, size)


def folds(layer: DecoderLayer) -> Iterator[Fold]:
    """Those of a layer, in the order of computing."""
    mixer, ffn = layer.mixer, layer.ffn
    of_mixer = (mixer.qkv,) if isinstance(mixer, Attention) else ()
    of_ffn = _first(ffn)
    if layer.spec.placement is Placement.SHARED:
        yield from _of_norm(layer.attention_norm, (*of_mixer, *of_ffn) if of_mixer and of_ffn else ())
    else:
        yield from _of_norm(layer.attention_norm, of_mixer)
    if isinstance(mixer, Attention) and not mixer.spec.qkv_clip:
        spec = mixer.spec
        values = slice(mixer.qkv.matrix.n_out - spec.kv_size, None)
        repeats = spec.n_heads // spec.n_kv_heads, spec.head_dim
        yield Fold((mixer.out,), _rows(mixer.qkv, values), repeats)
    if layer.spec.placement is not Placement.SHARED:
        yield from _of_norm(layer.ffn_norm, of_ffn)
    for up, down in _gated(ffn):
        yield Fold((down,), _rows(up, slice(down.matrix.n_in, None)))


def _of_norm(norm: Norm | None, readers: tuple[Linear, ...]) -> Iterator[Fold]:
    if norm is not None and norm.weight is not None and readers:
        yield Fold(readers, tuple(norm.tensors))


def _rows(linear: Linear, rows: slice) -> tuple[torch.Tensor, ...]:
    both = (matrix_of(linear), linear.bias)
    return tuple(tensor[rows] for tensor in both if tensor is not None)


def _first(ffn: Ffn) -> tuple[Linear, ...]:
    """What reads the input of a feed-forward; nothing: not known."""
    if isinstance(ffn, FeedForward):
        return (ffn.up,)
    if isinstance(ffn, Experts):
        shared = (one for one in (ffn.shared_up, ffn.shared_gate) if one is not None)
        return ffn.router, *ffn.up.linears, *shared
    return ()


def _gated(ffn: Ffn) -> Iterator[tuple[Linear, Linear]]:
    """Pairs of a matrix with gate and up under one another, and the one that reads act(gate) * up."""
    if isinstance(ffn, FeedForward) and ffn.spec.gated:
        yield ffn.up, ffn.down
    if isinstance(ffn, Experts):
        if ffn.spec.gating == moe.SWIGLU:
            yield from zip(ffn.up.linears, ffn.down.linears, strict=True)
        if ffn.shared_up is not None and ffn.shared_down is not None and ffn.shared_gate is None:
            yield ffn.shared_up, ffn.shared_down
