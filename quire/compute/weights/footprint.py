"""How much memory the weights of a model will take, from headers and shapes alone: nothing is allocated or read.

Owns the arithmetic of what `loader` will do: what each layer becomes, and the most that is there at once on the way.
Invariant: `held_bytes` is `Decoder.n_bytes` of the loaded model (tests compare them for every scheme).
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterable

import torch

from quire.compute.layers.linear import Linear, can_pack
from quire.compute.models.decoder import Decoder, decoder_on
from quire.compute.quant import SCHEMES
from quire.compute.weights import gguf_exact
from quire.compute.weights.header import Entry
from quire.compute.weights.loader import Copy, find_copies
from quire.config.arch import ModelArch
from quire.kernels import native
from quire.kernels.qgemm.weight import FLOATS, packed_bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of a model's weights."""

    held_bytes: int
    """Once loaded."""
    peak_bytes: int
    """Most at once while they are loaded: a matrix is there in both forms while it is rounded or laid out."""
    address_bytes: int
    """Most address space: all matrices are allocated before the first is filled."""


class Weights:
    """The weights that an engine would load from `folder`."""

    def __init__(self, folder: pathlib.Path, arch: ModelArch, device: str, load_format: str = "auto") -> None:
        """device: 'cpu' or 'cuda'. Reads the headers. Raises LoadError or ConfigError, as `load_model` would."""
        self._device = device
        self._arch = arch
        self._is_dummy = load_format == "dummy"
        self._copies: list[Copy] = []
        self._in_gguf = False
        if not self._is_dummy:
            _, copies, self._in_gguf = find_copies(folder, self._model(torch.bfloat16), load_format)
            self._copies = [copy for shard_copies in copies for copy in shard_copies if not copy.compare]

    def footprint(self, dtype: torch.dtype, quantization: str) -> Footprint:
        """With parameters of `dtype` and a value of `--quantization`."""
        model = self._model(dtype)
        owners, parts = model.owners(), dict(model.weights())
        order = list(parts) if self._is_dummy else self._names(model)
        held = self._held(model, quantization)
        adopted = {layer for layer, (_, is_exact) in held.items() if is_exact}
        left = {layer: sum(owner is layer for owner in owners.values()) for layer in held}
        now_bytes = peak_bytes = 0
        for name in order:
            layer = owners.get(name)
            # What a file's blocks fill directly never exists as floats.
            is_raw = layer not in adopted or name.endswith(".bias")
            now_bytes += parts[name].nbytes if is_raw else 0
            if layer is None:
                continue
            left[layer] -= 1
            if not left[layer]:
                n_bytes, is_exact = held[layer]
                peak_bytes = max(peak_bytes, now_bytes + n_bytes)
                now_bytes += n_bytes - (0 if is_exact or not n_bytes else layer.weight.nbytes)
        if model.head.is_tied:
            now_bytes += held[model.head][0]
        peak_bytes = max(peak_bytes, now_bytes)
        all_bytes = sum(part.nbytes for part in parts.values())
        mapped_bytes = all_bytes + max(n_bytes for n_bytes, _ in held.values())
        return Footprint(now_bytes, peak_bytes, max(mapped_bytes, peak_bytes))

    def _names(self, model: Decoder) -> list[str]:
        """The parameters in the order of the files."""
        wholes = model.wholes()
        parts = (wholes[copy.target][1] if copy.target in wholes else [copy.target] for copy in self._copies)
        return [name for names in parts for name in names]

    def _held(self, model: Decoder, quantization: str) -> dict[Linear, tuple[int, bool]]:
        """Layer → (bytes of its packed matrix, 0 where it stays as it is; whether a file's blocks are its content)."""
        scheme = SCHEMES[quantization]
        allowed = gguf_exact.schemes(quantization, self._device) if self._in_gguf else ()
        files: dict[Linear, list[Entry]] = {}
        entries = {copy.target: copy.entry for copy in self._copies}
        for name, layer in model.owners().items():
            if name.endswith(".weight") and name in entries:
                files.setdefault(layer, []).append(entries[name])
        if model.head.is_tied and gguf_exact.TABLE in entries:
            files[model.head] = [entries[gguf_exact.TABLE]]
        rounded = None if scheme is None else scheme.name
        return {layer: self._layer(layer, files.get(layer, ()), allowed, rounded) for layer in model.linears()}

    def _layer(
        self, layer: Linear, files: Iterable[Entry], allowed: tuple[str, ...], scheme: str | None
    ) -> tuple[int, bool]:
        exact = gguf_exact.holder(files, allowed) if allowed else None
        dtype, (n, k) = layer.weight.dtype, layer.weight.shape
        name = exact or scheme
        if name is not None:
            return packed_bytes(name, n, k), exact is not None
        if self._device == "cpu" and native.library() is not None and dtype in native.DTYPES:
            return packed_bytes(FLOATS[dtype], n, k), False
        return (n * k * dtype.itemsize if can_pack(self._device, dtype) else 0), False

    def _model(self, dtype: torch.dtype) -> Decoder:
        return decoder_on(torch.device("meta"), self._arch, dtype, 1)
