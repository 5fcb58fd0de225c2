"""The tensors that a layer becomes in a file: codes packed as compressed-tensors has them, the others as they were.

Owns layouts and names of stored tensors. Does not own which matrices are rounded (`session`) nor files (`folder`).
Source: compressed-tensors, compressors/pack_quantized and naive_quantized.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from quire.compute.layers.decoder_layer import DecoderLayer
from quire.compute.layers.linear import Linear
from quire.compute.quantize.grid import Rounded
from quire.compute.quantize.source import Source, raw
from quire.compute.quantize.sparse import Pruned
from quire.compute.quantize.watched import matrix_of
from quire.compute.weights.found import Copy
from quire.compute.weights.names import Rows, rearrange
from quire.compute.weights.pieces import TORCH_DTYPES
from quire.config.quantize import Format


def packed(codes: torch.Tensor) -> torch.Tensor:
    """[n, k] integers from -8 to 7 → int32 [n, ceil(k / 8)]: code + 8, the first of eight in the lowest bits."""
    nibbles = torch.nn.functional.pad((codes + 8).to(torch.uint8), (0, -codes.shape[1] % 8))
    return (nibbles[:, 0::2] | nibbles[:, 1::2] << 4).view(torch.int32)


def tensors_of(rounded: Rounded, stem: str) -> dict[str, torch.Tensor]:
    """What a rounded matrix is stored as, by name. stem: of the module."""
    form, codes = rounded.grid.form, rounded.codes.cpu()
    found = {f"{stem}.weight_scale": rounded.scales.to(rounded.grid.scale_dtype).cpu()}
    if form.n_bits == 4:
        shape = torch.tensor(codes.shape, dtype=torch.int64)
        return found | {f"{stem}.weight_packed": packed(codes), f"{stem}.weight_shape": shape}
    return found | {f"{stem}.weight": codes.to(torch.float8_e4m3fn if form.is_float else torch.int8)}


def in_file_order(tensor: torch.Tensor, rows: Rows) -> torch.Tensor:
    """The inverse of `rearrange`: rows of ours as the checkpoint has them."""
    if rows.is_ours:
        return tensor
    places = torch.arange(len(tensor)).view(-1, *[1] * (tensor.dim() - 1))
    rearrange(places, rows)
    found = torch.empty_like(tensor)
    found[places.flatten().to(tensor.device)] = tensor
    return found


def layer_tensors(
    source: Source, number: int, layer: DecoderLayer, rounded: Mapping[Linear, Rounded | Pruned], folded: bool
) -> dict[str, torch.Tensor]:
    """All tensors of a layer, by their names in the file. folded: what was not rounded may have changed too."""
    places = {name: (linear, rows) for linear in layer.linears for name, rows in _parts(linear)}
    offsets = {name: norm.table.spec.offset for norm in layer.norms for name in norm.table.parts}
    found: dict[str, torch.Tensor] = {}
    for shard, copy in source.tensors(number):
        stem, _, kind = copy.target.rpartition(".")
        linear, rows = places.get(stem, (None, slice(None)))
        if linear is not None and linear in rounded and kind == "weight":
            found |= _matrix(rounded[linear], rows, copy)
            continue
        stored = raw(shard, copy)
        changed = _changed(layer, linear, rows, stem, kind) if folded else None
        if changed is not None:
            stored = in_file_order(changed - offsets.get(stem, 0.0), copy.rows).to("cpu", stored.dtype)
        found[copy.entry.name] = stored
    return found


def n_bytes_of(source: Source, form: Format, scale_itemsize: int) -> int:
    """Of all tensors that a checkpoint becomes in a format."""
    own = (matrix for matrix in source.quantised(form.group) if not form.is_sparse)
    rounded = {f"{name}.weight" for matrix in own for name in (*dict(matrix.parts), matrix.whole)}
    total = 0
    for _, copy in source.tensors():
        if copy.target not in rounded:
            total += copy.entry.n_bytes
            continue
        n, k = copy.entry.shape
        words = -(-k // 8) * 4 if form.n_bits == 4 else k
        shape = 2 * torch.int64.itemsize if form.n_bits == 4 else 0
        total += n * words + n * (k // form.group if form.group else 1) * scale_itemsize + shape
    return total


def _matrix(made: Rounded | Pruned, rows: slice, copy: Copy) -> dict[str, torch.Tensor]:
    """Of these rows of a matrix, in the place of `copy`."""
    if isinstance(made, Pruned):
        dense = in_file_order(made.matrix[rows], copy.rows)
        return {copy.entry.name: dense.to("cpu", TORCH_DTYPES[copy.entry.dtype])}
    codes, scales = (in_file_order(one[rows], copy.rows) for one in (made.codes, made.scales))
    return tensors_of(Rounded(made.grid, codes, scales), copy.entry.name.removesuffix(".weight"))


def _parts(linear: Linear) -> list[tuple[str, slice]]:
    """(name, rows) of each part of a matrix, and of the whole."""
    found, first = [(linear.matrix.whole, slice(None))] if linear.matrix.whole else [], 0
    for name, n_rows in linear.matrix.parts:
        found.append((name, slice(first, first + n_rows)))
        first += n_rows
    return found


def _changed(layer: DecoderLayer, linear: Linear | None, rows: slice, stem: str, kind: str) -> torch.Tensor | None:
    """What is in memory of a tensor that a fold may have changed, with a norm's offset; None: it cannot have."""
    if linear is not None:
        tensor = matrix_of(linear) if kind == "weight" else linear.bias
        return None if tensor is None else tensor[rows]
    for norm in (layer.attention_norm, layer.ffn_norm):
        if norm is not None and norm.table.name == stem:
            return norm.weight if kind == "weight" else norm.bias
    return None
