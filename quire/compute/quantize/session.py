"""One run of `quire quantize`: layer after layer is loaded, calibrated, rounded, written, and run again as rounded.

Owns the order, and the streams of text between layers: those that calibrate go through rounded layers, those that are
scored through both. Does not own methods (`gptq`, `awq`, `grid`), files (`folder`) nor text.
Invariant: memory holds one layer, its Hessians and the streams, whatever the number of layers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Final

import torch

from quire.compute.device.device import Device
from quire.compute.layers.decoder_layer import DecoderLayer
from quire.compute.layers.linear import Linear
from quire.compute.quantize.alone import Alone
from quire.compute.quantize.awq import Reader, best_scales
from quire.compute.quantize.folds import folds
from quire.compute.quantize.gptq import gptq
from quire.compute.quantize.grid import Grid, Rounded, nearest, output_error
from quire.compute.quantize.quality import n_bits
from quire.compute.quantize.source import Source, raw
from quire.compute.quantize.sparse import Pruned, two_of_four
from quire.compute.quantize.stored import layer_tensors
from quire.compute.quantize.watched import Statistics, matrix_of, product_of
from quire.config.layers import LayerSpec
from quire.config.parameters import embedding, head, layer_parameters
from quire.config.quantize import Format
from quire.core.errors import ConfigError, LoadError
from quire.core.units import format_bytes

COPIES: Final = 6
"""Of a matrix in float32 while it is rounded."""


@dataclasses.dataclass(frozen=True, slots=True)
class Recipe:
    """How matrices are rounded."""

    form: Format
    method: str
    """A value of --method."""
    act_order: bool = False
    damping: float = 0.01


@dataclasses.dataclass(frozen=True, slots=True)
class LayerReport:
    """What became of a layer."""

    number: int
    errors: Mapping[str, tuple[float, float]]
    """Name of a matrix → relative error of its outputs on the calibration text: of this method, and of the plain one,
    which does not look at inputs."""
    tensors: Mapping[str, torch.Tensor]
    """To be written, by name."""


@dataclasses.dataclass(frozen=True, slots=True)
class Streams:
    """Pieces of text, each int64 [n, length], on the device; their states are made of them."""

    calibration: torch.Tensor
    held_out: torch.Tensor


def needed_bytes(source: Source, streams: Streams) -> int:
    """Most memory at once: embedding and head, one layer with its Hessians and copies of its largest matrix, states."""
    arch, itemsize = source.arch, source.dtype.itemsize
    ends = [embedding(arch), *([] if arch.tie_embeddings else [head(arch)])]
    found = sum(one.n_out * one.n_in for one in ends) * itemsize
    sizes = [0]
    for number, spec in enumerate(arch.layers):
        matrices = layer_parameters(spec, arch.hidden_size, number).matrices
        copies = COPIES * max((one.n_out * one.n_in for one in matrices), default=0)
        sizes.append(sum(one.n_out * one.n_in * itemsize + 4 * one.n_in**2 for one in matrices) + 4 * copies)
    n_states = 3 * streams.calibration.numel() + 4 * streams.held_out.numel()
    return found + max(sizes) + n_states * arch.hidden_size * (4 if arch.float32_stream else itemsize)


class Session:
    """To be run once: `layers`, then `rest` and `quality`."""

    def __init__(self, source: Source, device: Device, recipe: Recipe, streams: Streams) -> None:
        """ConfigError where memory is too small; LoadError for a damaged checkpoint."""
        needed, free = needed_bytes(source, streams), device.free_bytes()
        if 0 < free < needed:
            raise ConfigError(
                f"calibrating takes {format_bytes(needed)} at once, {format_bytes(free)} are free: take fewer samples"
                f" than {len(streams.calibration):,} (--samples), shorter ones (--sample-tokens), or another device"
            )
        self._source, self._device, self._recipe = source, device, recipe
        self._length = streams.calibration.shape[1]
        self._ends = source.ends(self._length)
        self._held_out = streams.held_out
        self._calibrating, self._exact = (self._embedded(ids) for ids in (streams.calibration, streams.held_out))
        self._rounded = self._exact
        self._contexts: dict[LayerSpec, Alone] = {}
        floats = {"bfloat16": torch.bfloat16, "float16": torch.float16}
        self.scale_dtype = floats.get(source.arch.dtype, torch.float32)
        """That scales are stored in."""
        self._grid = Grid(recipe.form, self.scale_dtype)

    def _embedded(self, ids: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)
        return torch.stack([self._ends.forward(one, positions, None) for one in ids])  # type: ignore[arg-type]

    def layers(self) -> Iterator[LayerReport]:
        """All of them, in order."""
        for number, spec in enumerate(self._source.arch.layers):
            if spec not in self._contexts:
                own = Alone(self._source.arch, spec, self._length, self._source.dtype, self._device)
                self._contexts = {spec: own}
            layer, alone = self._source.layer(number, self._ends), self._contexts[spec]
            self._device.synchronize()  # a product may read its matrix before what writes it has ended
            statistics = self._calibrate(layer, alone, number)
            self._exact = alone.run(layer, self._exact)
            rounded, errors = self._round(layer, statistics)
            self._device.synchronize()
            self._calibrating = alone.run(layer, self._calibrating)
            self._rounded = alone.run(layer, self._rounded)
            folded = self._recipe.method == "awq"
            yield LayerReport(number, errors, layer_tensors(self._source, number, layer, rounded, folded))

    def rest(self) -> dict[str, torch.Tensor]:
        """The tensors of no layer, to be written as they are."""
        return {copy.entry.name: raw(shard, copy) for shard, copy in self._source.rest()}

    def quality(self) -> tuple[float, float]:
        """Bits of the held-out pieces, (before, after), behind the last layer."""
        before, after = (n_bits(self._ends, states, self._held_out) for states in (self._exact, self._rounded))
        return before, after

    def _calibrate(self, layer: DecoderLayer, alone: Alone, number: int) -> dict[Linear, Statistics]:
        """What goes into each matrix of the layer as it is."""
        found = {linear: Statistics(linear.matrix.n_in, self._device.torch_device) for linear in layer.linears}
        for linear, statistics in found.items():
            product_of(linear).seen = statistics
        alone.run(layer, self._calibrating)
        for linear, statistics in found.items():
            product_of(linear).seen = None
            if not bool(torch.isfinite(statistics.hessian.diagonal()).all()):
                raise LoadError(
                    f"layer {number}: {linear.matrix.name} is given infinite or no numbers as {self._source.dtype}:"
                    " the model does not work in this type, or its weights are damaged"
                )
        return found

    def _round(
        self, layer: DecoderLayer, statistics: Mapping[Linear, Statistics]
    ) -> tuple[dict[Linear, Rounded | Pruned], dict[str, tuple[float, float]]]:
        """Round all matrices in place that can be; errors by name."""
        names = {matrix.name for matrix in self._source.quantised(self._grid.form.group)}
        wanted = [linear for linear in layer.linears if linear.matrix.name in names]
        plain = {one: self._error(self._plain(matrix_of(one).float()), one, statistics) for one in wanted}
        if self._recipe.method == "awq":
            self._fold(layer, statistics, set(wanted))
        found: dict[Linear, Rounded | Pruned] = {}
        errors = {}
        for linear in wanted:
            rounded = self._rounded_matrix(matrix_of(linear).float(), statistics[linear])
            found[linear] = rounded
            errors[linear.matrix.name] = self._error(rounded, linear, statistics), plain[linear]
            matrix_of(linear).copy_(rounded.matrix)
        return found, errors

    def _error(self, rounded: Rounded | Pruned, linear: Linear, statistics: Mapping[Linear, Statistics]) -> float:
        weight = matrix_of(linear).float()
        return output_error(rounded.matrix - weight, weight, statistics[linear].hessian)

    def _plain(self, weight: torch.Tensor) -> Rounded | Pruned:
        return two_of_four(weight) if self._recipe.form.is_sparse else nearest(weight, self._grid)

    def _rounded_matrix(self, weight: torch.Tensor, statistics: Statistics) -> Rounded | Pruned:
        if self._recipe.method == "wanda":
            return two_of_four(weight, statistics.hessian.diagonal().sqrt() if statistics.n_rows else None)
        if self._recipe.method != "gptq" or not statistics.n_rows:  # an expert that no token chose has no Hessian
            return self._plain(weight)
        return gptq(
            weight, statistics.hessian, self._grid, damping=self._recipe.damping, act_order=self._recipe.act_order
        )

    def _fold(self, layer: DecoderLayer, statistics: Mapping[Linear, Statistics], rounded: set[Linear]) -> None:
        """Scale inputs of matrices that will be rounded, wherever something before them can take it."""
        for fold in folds(layer):
            seen = [
                Reader(matrix_of(one).float(), statistics[one].hessian)
                for one in fold.readers
                if one in rounded and statistics[one].n_rows
            ]
            if seen:
                magnitudes = fold.shared(statistics[fold.readers[0]].magnitudes)
                factors, _ = best_scales(seen, magnitudes, self._grid)
                fold.apply(factors)
                for reader in fold.readers:
                    statistics[reader].scale(1 / factors)
