"""Building a model: checks a checkpoint against it, allocates, streams weights into the fused parameters.

Owns the match of names, shapes and dtypes, and the copies. Does not own files (`checkpoint`) or data flow (`models`).
Invariant: everything that can be known from headers is checked before a parameter is allocated.
"""

from __future__ import annotations

import contextlib
import logging
import pathlib
from collections.abc import Callable, Iterable, Iterator
from typing import Final

import msgspec
import torch
from tqdm import tqdm

from quire.compute.models.decoder import Decoder, decoder_on
from quire.compute.schemes.choice import TABLE, Schemes, choose
from quire.compute.weights import gguf_exact
from quire.compute.weights.checkpoint import Shard, open_checkpoint, open_shard, read_into
from quire.compute.weights.dummy import fill_random
from quire.compute.weights.gguf import open_gguf
from quire.compute.weights.gguf_blocks import DECODERS
from quire.compute.weights.header import Entry
from quire.compute.weights.names import Names, Rows, rearrange, stored_shape
from quire.config.arch import ModelArch
from quire.config.gguf import BLOCKS, is_gguf
from quire.config.parameters import EMBEDDING, HEAD
from quire.core.errors import ConfigError, LoadError, shown
from quire.core.ticker import ticking
from quire.core.units import format_bytes

BUFFER_BYTES: Final = 16 << 20
TORCH_DTYPES: Final = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""dtype of the format → dtype of torch, for those that weights may have."""
BLOCK_BYTES: Final = {name: n_bytes for name, _, n_bytes in BLOCKS.values()}
BLOCK_BUFFER_BYTES: Final = 1 << 20
"""Bytes of quantised blocks decoded at once; as float32 they are up to eight times as many."""
LISTED: Final = 8
"""Most tensor names in one error message."""
TIED_HEAD: Final = (f"{HEAD}.weight", f"{EMBEDDING}.weight")
_logger = logging.getLogger(__name__)


class Copy(msgspec.Struct, frozen=True):
    """One tensor to read and where it goes."""

    entry: Entry
    target: str
    """Name among the model's weights."""
    compare: bool = False
    """Do not write: the target is loaded already and must be equal."""
    rows: Rows = Rows()
    """How they are ordered in the file."""


def load_model(
    folder: pathlib.Path,
    arch: ModelArch,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    load_format: str = "auto",
    seed: int = 0,
    quantization: str = "none",
    check_finite: bool = True,
    progress: bool | None = None,
) -> Decoder:
    """A model with the weights of `folder`, or with random ones of `seed` if load_format is 'dummy'.

    dtype: of parameters and activations; weights are converted to it. max_model_len: length of the rotary table.
    quantization: a name of `schemes.choice.SCHEMES`; 'auto' keeps blocks of a GGUF file. A matrix is finished as soon
    as it is complete, so that few are in memory in both forms. check_finite: refuse NaN and infinity. progress: show a
    bar; None shows it on a terminal only.
    Raises LoadError naming files and tensors, ConfigError if max_model_len exceeds what the architecture covers.
    """
    if not 0 < max_model_len <= arch.max_position_scaled:
        raise ConfigError(
            f"max_model_len = {max_model_len:,} must be from 1 to {arch.max_position_scaled:,}, the model's context",
            param="max_model_len",
        )
    for rope in arch.ropes:
        if rope.type in ("dynamic", "longrope") and max_model_len > rope.original_max_position:
            _logger.warning(
                "max_model_len = %d exceeds the original context of %d tokens: %s rope scaling uses the frequencies for"
                " %d tokens at every length, so shorter prompts differ slightly from transformers",
                *(max_model_len, rope.original_max_position, rope.type, max_model_len),
            )

    def build(schemes: Schemes) -> Decoder:
        return decoder_on(device, arch, dtype, max_model_len, schemes)

    if load_format == "dummy":
        model = build(choose(quantization, device, dtype))
        total = sum(tensor.nbytes for _, tensor in model.weights())
        with ticking("making random weights", total, format_bytes) as ticker:
            fill_random(_packing(model, ticker.advance), seed, device)
    else:
        nowhere = decoder_on(torch.device("meta"), arch, dtype, max_model_len)
        shards, copies, in_gguf = find_copies(folder, nowhere, load_format)
        entries = {copy.target: copy.entry for copy in copies[0] if not copy.compare} if in_gguf else None
        model = build(choose(quantization, device, dtype, arch, entries))
        targets = Targets(model)
        if entries is not None:
            targets.places = gguf_exact.places(model, entries)
        _stream(shards, copies, targets, check_finite, progress)
    model.finish()
    return model


def find_copies(folder: pathlib.Path, model: Decoder, load_format: str) -> tuple[list[Shard], list[list[Copy]], bool]:
    """(shards of a checkpoint, what each gives to `model`, whether it is a GGUF file), from headers alone.

    Raises LoadError and ConfigError as `load_model`.
    """
    in_gguf = is_gguf(folder)
    if in_gguf and load_format == "safetensors":
        raise ConfigError(f"load_format = 'safetensors', but {folder} is a GGUF file: leave it at auto")
    shards = [open_gguf(folder)] if in_gguf else open_checkpoint(folder)
    return shards, _match(shards, model, in_gguf), in_gguf


def fits(folder: pathlib.Path, arch: ModelArch) -> tuple[int, int]:
    """(files, tensors) of a checkpoint of `arch`, from headers alone. Raises LoadError as `load_model`."""
    shards, copies, _ = find_copies(folder, decoder_on(torch.device("meta"), arch, torch.float32, 1), "auto")
    return len(shards), sum(map(len, copies))


class Targets:
    """The parameters that still take values; a layer whose last one got its values is finished and let go."""

    def __init__(self, model: Decoder) -> None:
        self._offsets = model.offsets()
        self._owners = model.owners()
        self._wholes = model.wholes()
        self.tensors = dict(model.weights()) | {name: whole for name, (whole, _) in self._wholes.items()}
        self.places: dict[str, gguf_exact.Place] = {}
        """Names whose blocks go there as they are."""

    def copied(self, copy: Copy) -> None:
        """All bytes of a tensor are in its place, in the order of the file."""
        tensor = self.tensors[copy.target]
        rearrange(tensor, copy.rows)
        if copy.target in self._offsets:
            tensor.add_(self._offsets[copy.target])

    def filled(self, name: str) -> None:
        """`name` has its values. Embeddings and norms stay, for the comparison with a tied head."""
        if name in self._wholes:
            whole, parts = self._wholes.pop(name)
            del self.tensors[name], whole
            for part in parts:
                self.filled(part)
            return
        layer = self._owners.pop(name, None)
        if layer is not None:
            del self.tensors[name]
            if layer not in self._owners.values():
                self._forget_wholes()
                layer.finish()

    def _forget_wholes(self) -> None:
        """Let go of views whose parts have all got their values."""
        for whole in [one for one, (_, parts) in self._wholes.items() if self._owners.keys().isdisjoint(parts)]:
            del self._wholes[whole], self.tensors[whole]


def _packing(model: Decoder, advance: Callable[[int], object]) -> Iterator[tuple[str, torch.Tensor]]:
    """`model.weights()`, where what was given before the next is asked for has its values."""
    targets = Targets(model)
    for name in [name for name, _ in model.weights()]:
        tensor = targets.tensors[name]
        yield name, tensor
        advance(tensor.nbytes)
        del tensor  # or it would keep its matrix while that is finished
        targets.filled(name)


def _match(shards: list[Shard], model: Decoder, in_gguf: bool) -> list[list[Copy]]:
    """What to copy from each shard. Raises LoadError: missing, left-over or mis-shaped tensors, an unusable dtype."""
    names, wholes = Names(model.arch, in_gguf), model.wholes()
    wanted = dict(model.weights())
    places = wanted | {name: whole for name, (whole, _) in wholes.items()}
    copies = [list(_copies(shard.entries, places, names, model.arch)) for shard in shards]
    targets = {copy.target for shard_copies in copies for copy in shard_copies if not copy.compare}
    found = targets | {part for name in targets if name in wholes for part in wholes[name][1]}
    _refuse("has no tensor", sorted(set(wanted) - found))
    for copy in (copy for shard_copies in copies for copy in shard_copies):
        expected = stored_shape(tuple(places[copy.target].shape), copy.rows)
        if copy.entry.shape != expected:
            raise LoadError(f"tensor {copy.entry.name} has shape {copy.entry.shape}; config.json implies {expected}")
        if copy.entry.dtype not in TORCH_DTYPES and copy.entry.dtype not in DECODERS:
            raise LoadError(
                f"tensor {copy.entry.name} has dtype {copy.entry.dtype}; usable are {', '.join(TORCH_DTYPES)}"
            )
    return copies


def _copies(entries: Iterable[Entry], places: dict[str, torch.Tensor], names: Names, arch: ModelArch) -> Iterator[Copy]:
    left_over = []
    for entry in entries:
        target, rows = names.parameter(entry.name)
        if target in places:
            yield Copy(entry, target, rows=rows)
        elif arch.tie_embeddings and target == TIED_HEAD[0]:
            yield Copy(entry, TIED_HEAD[1], compare=True)
        elif not names.is_computed(entry.name):
            left_over.append(entry.name)
    _refuse("has tensors that the model does not use:", left_over)


def _refuse(what: str, names: list[str]) -> None:
    if names:
        more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
        raise LoadError(f"the checkpoint {what} {', '.join(shown(name) for name in names[:LISTED])}{more}")


def _stream(
    shards: list[Shard],
    copies: list[list[Copy]],
    targets: Targets,
    check_finite: bool,
    progress: bool | None,
) -> None:
    """Read all shards in the order of their bytes; comparisons come last, when their targets are filled."""
    buffer = torch.empty(BUFFER_BYTES, dtype=torch.uint8)
    total = sum(copy.entry.n_bytes for shard_copies in copies for copy in shard_copies)
    disable = None if progress is None else not progress
    with contextlib.ExitStack() as stack:
        bar = stack.enter_context(tqdm(total=total, unit="B", unit_scale=True, desc="Loading weights", disable=disable))
        advance: Callable[[int], object] = bar.update
        if bar.disable:
            advance = stack.enter_context(ticking("loading weights", total, format_bytes)).advance
        for compare in (False, True):
            for shard, shard_copies in zip(shards, copies, strict=True):
                chosen = [copy for copy in shard_copies if copy.compare == compare]
                if chosen:
                    _read_tensors(shard, chosen, targets, buffer, check_finite, advance)


def _read_tensors(
    shard: Shard,
    copies: list[Copy],
    targets: Targets,
    buffer: torch.Tensor,
    check_finite: bool,
    advance: Callable[[int], object],
) -> None:
    with open_shard(shard) as descriptor:
        for copy in copies:
            if copy.target in targets.places and not copy.compare:
                place = targets.places[copy.target]
                for n_bytes in gguf_exact.fill(descriptor, copy.entry, place, copy.rows.n_interleaved, shard.path):
                    advance(n_bytes if copy.target != TABLE else 0)
                if copy.target != TABLE:
                    targets.filled(copy.target)
                    continue
            target = targets.tensors[copy.target].view(-1)
            for start, piece in _pieces(descriptor, copy.entry, buffer, shard.path):
                part = target[start : start + len(piece)]
                if not copy.compare:
                    part.copy_(piece)
                elif not torch.equal(part, piece.to(part.device, part.dtype)):
                    raise LoadError(
                        f"{copy.entry.name} differs from {copy.target}, but tie_word_embeddings is true in config.json"
                    )
                advance(piece.numel() * copy.entry.n_bytes // target.numel())
            if not copy.compare:
                targets.copied(copy)
            if check_finite and not _is_finite(target):
                raise LoadError(
                    f"tensor {copy.entry.name} in {shard.path} has NaN or infinite values as {target.dtype}"
                )
            targets.filled(copy.target)


def _pieces(
    descriptor: int, entry: Entry, buffer: torch.Tensor, path: pathlib.Path
) -> Iterator[tuple[int, torch.Tensor]]:
    """(index of the first element, elements) over a tensor's bytes; each piece is valid until the next."""
    if entry.dtype in DECODERS:
        yield from _decoded_pieces(descriptor, entry, buffer, path)
        return
    dtype = TORCH_DTYPES[entry.dtype]
    for offset in range(0, entry.n_bytes, len(buffer)):
        raw = buffer[: min(len(buffer), entry.n_bytes - offset)]
        read_into(descriptor, raw.numpy().data, entry.start + offset, path)
        yield offset // dtype.itemsize, raw.view(dtype)


def _decoded_pieces(
    descriptor: int, entry: Entry, buffer: torch.Tensor, path: pathlib.Path
) -> Iterator[tuple[int, torch.Tensor]]:
    """As `_pieces`, for blocks that hold a scale and small integers."""
    decode, block_bytes, first = DECODERS[entry.dtype], BLOCK_BYTES[entry.dtype], 0
    step = BLOCK_BUFFER_BYTES // block_bytes * block_bytes
    for offset in range(0, entry.n_bytes, step):
        raw = buffer[: min(step, entry.n_bytes - offset)]
        read_into(descriptor, raw.numpy().data, entry.start + offset, path)
        piece = decode(raw.view(-1, block_bytes)).view(-1)
        yield first, piece
        first += len(piece)


def _is_finite(values: torch.Tensor) -> bool:
    """One fast pass: the extremes are finite exactly if all values are (NaN propagates)."""
    low, high = torch.aminmax(values)
    return bool(torch.isfinite(low) & torch.isfinite(high))
