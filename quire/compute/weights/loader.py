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

from quire.compute.dist.comm import Comm
from quire.compute.models.decoder import Decoder, decoder_on
from quire.compute.schemes.choice import TABLE, Schemes, choose
from quire.compute.weights import coded, dummy, gguf_exact
from quire.compute.weights.checkpoint import Shard, open_checkpoint, open_shard
from quire.compute.weights.coded import CodedTensor
from quire.compute.weights.found import Copy, Found
from quire.compute.weights.gguf import open_gguf
from quire.compute.weights.gguf_blocks import DECODERS
from quire.compute.weights.header import Entry
from quire.compute.weights.names import Names, Rows, rearrange, stored_shape
from quire.compute.weights.pieces import BUFFER_BYTES, TORCH_DTYPES, Pieces, pieces, take
from quire.compute.weights.targets import Targets
from quire.config.arch import ModelArch
from quire.config.families import Order
from quire.config.gguf import is_gguf
from quire.config.model import assumed_words
from quire.config.parameters import EMBEDDING, HEAD
from quire.config.resolve import NOT_ROUNDED
from quire.config.stages import LayerRange
from quire.core.errors import ConfigError, LoadError, shown
from quire.core.ticker import ticking
from quire.core.units import format_bytes

LISTED: Final = 8
"""Most tensor names in one error message."""
TIED_HEAD: Final = (f"{HEAD}.weight", f"{EMBEDDING}.weight")
_logger = logging.getLogger(__name__)


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
    comm: Comm | None = None,
    layers: LayerRange | None = None,
) -> Decoder:
    """A model with the weights of `folder`, or with random ones of `seed`, in the codings that config.json names, if
    load_format is 'dummy'; of several ranks the part of one.

    dtype: of parameters and activations; weights are converted to it. max_model_len: length of the rotary table.
    quantization: a value of --quantization; 'auto' keeps blocks of a GGUF file. A matrix is finished as soon
    as it is complete, so that few are in memory in both forms. check_finite: refuse NaN and infinity. progress: show a
    bar; None shows it on a terminal only. comm, layers: of the rank, see `Decoder`; None: it is the only one.
    Raises LoadError naming files and tensors, ConfigError if max_model_len exceeds what the architecture covers or the
    model cannot be divided.
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
        return decoder_on(device, arch, dtype, max_model_len, schemes, comm, layers)

    nowhere = decoder_on(torch.device("meta"), arch, dtype, max_model_len)
    if load_format == "dummy":
        implied = dummy.implied(arch, dtype)
        schemes = choose(quantization, device, dtype, arch, sources=implied)
        model = build(schemes)
        dummy.fill_model(model, nowhere, schemes, implied, seed)
    else:
        found = find_copies(folder, nowhere, load_format)
        schemes = choose(quantization, device, dtype, arch, found.gguf_entries, found.sources)
        model = build(schemes)
        targets = Targets(model, found.in_gguf)
        if found.gguf_entries is not None:
            targets.places = gguf_exact.places(model, found.gguf_entries)
        elif found.coded:
            targets.fillings = coded.fillings(model)
            own = {one.target: one.coding for one in found.coded if one.target in targets}
            otherwise = f"decoded into {str(dtype).removeprefix('torch.')}, once"
            _logger.info("the checkpoint is quantised: %s", coded.words(own, targets.fillings, otherwise))
            if quantization not in NOT_ROUNDED:
                _tell_rounded(quantization, *coded.rounded(own, model, schemes.default))
        _stream(found, targets, check_finite, progress)
    model.finish()
    return model


def _tell_rounded(quantization: str, n_again: int, n_others: int) -> None:
    """What --quantization does to a checkpoint that is quantised."""
    if n_again:
        _logger.warning(
            "--quantization %s: %s matrices of the checkpoint are quantised in another form, so they are decoded and"
            " rounded a second time; leave it out, and they stay as the checkpoint has them",
            *(quantization, f"{n_again:,}"),
        )
    else:
        own = "quantised matrices keep the checkpoint's own form"
        _logger.info("--quantization %s: %s; others that it rounds: %s", quantization, own, f"{n_others:,}")


def find_copies(folder: pathlib.Path, model: Decoder, load_format: str) -> Found:
    """What the checkpoint in `folder` gives to `model`, which is a whole one.

    Raises LoadError and ConfigError as `load_model`.
    """
    in_gguf = is_gguf(folder)
    if in_gguf and load_format == "safetensors":
        raise ConfigError(f"load_format = 'safetensors', but {folder} is a GGUF file: leave it at auto")
    shards = [open_gguf(folder)] if in_gguf else open_checkpoint(folder)
    try:
        return _match(shards, model, in_gguf)
    except LoadError as error:
        if in_gguf:
            raise
        raise LoadError(error.message + assumed_words(folder)) from None


def fits(folder: pathlib.Path, arch: ModelArch) -> tuple[int, int]:
    """(files, tensors) of a checkpoint of `arch`, from headers alone. Raises LoadError as `load_model`."""
    found = find_copies(folder, decoder_on(torch.device("meta"), arch, torch.float32, 1), "auto")
    return len(found.shards), sum(map(len, found.copies)) + sum(len(one.parts) for one in found.coded)


def fill(model: Decoder, found: Found) -> None:
    """Read a part of what was found for a whole model into its parameters; linear layers that have all of theirs are
    finished. Raises LoadError."""
    _stream(found, Targets(model, found.in_gguf), check_finite=True, progress=False)


def _match(shards: list[Shard], model: Decoder, in_gguf: bool) -> Found:
    """Raises LoadError: missing, left-over or mis-shaped tensors, an unusable dtype."""
    names, wholes = Names(model.arch, in_gguf), model.wholes()
    wanted = dict(model.weights())
    places = wanted | {name: whole for name, (whole, _) in wholes.items()}
    coded_tensors, others, zeros = coded.gather(shards, names, model.arch, places)
    fused = {name: [(part, len(wanted[part])) for part in parts] for name, (_, parts) in wholes.items()}
    copies = [list(_copies(entries, places, names, model.arch, fused if in_gguf else {})) for entries in others]
    targets = {copy.target for shard_copies in copies for copy in shard_copies if not copy.compare}
    targets |= {one.target for one in coded_tensors}
    found = targets | {part for name in targets if name in wholes for part in wholes[name][1]}
    _refuse("has no tensor", sorted(names.in_checkpoint(one) for one in set(wanted) - found))
    for copy in (copy for shard_copies in copies for copy in shard_copies):
        expected = stored_shape(tuple(places[copy.target].shape), copy.rows)
        if copy.entry.shape != expected:
            raise LoadError(f"tensor {copy.entry.name} has shape {copy.entry.shape}; config.json implies {expected}")
        if copy.entry.dtype not in TORCH_DTYPES and copy.entry.dtype not in DECODERS:
            raise LoadError(
                f"tensor {copy.entry.name} has dtype {copy.entry.dtype}; usable are {', '.join(TORCH_DTYPES)}"
            )
    return Found(shards, copies, coded_tensors, in_gguf, zeros)


def _copies(
    entries: Iterable[Entry],
    places: dict[str, torch.Tensor],
    names: Names,
    arch: ModelArch,
    fused: dict[str, list[tuple[str, int]]],
) -> Iterator[Copy]:
    """fused: name of a tensor → (parameter, rows) of those that it has under one another and that are read apart."""
    left_over = []
    for entry in entries:
        stack = names.of_experts(entry.name)
        if stack is not None:
            yield from _of_experts(entry, *stack)
            continue
        target, rows = names.parameter(entry.name)
        if target in fused:
            yield from _in_parts(entry, fused[target], names)
        elif target in places:
            yield Copy(entry, target, rows=rows)
        elif arch.tie_embeddings and target == TIED_HEAD[0]:
            yield Copy(entry, TIED_HEAD[1], compare=True)
        elif not names.is_left_out(entry.name):
            left_over.append(entry.name)
    _refuse("has tensors that the model does not use:", left_over)


def _of_experts(entry: Entry, targets: list[str], rows: Rows) -> Iterator[Copy]:
    """A copy for each expert, of its part of the tensor. Raises LoadError."""
    if not targets or not entry.shape or entry.shape[0] != len(targets):
        raise LoadError(
            f"tensor {entry.name} has shape {entry.shape}; config.json implies {len(targets)} experts in its first"
            " dimension"
        )
    n_bytes = entry.n_bytes // len(targets)
    for expert, target in enumerate(targets):
        start, name = entry.start + expert * n_bytes, f"{entry.name}[{expert}]"
        part = msgspec.structs.replace(entry, name=name, shape=entry.shape[1:], start=start, n_bytes=n_bytes)
        yield Copy(part, target, rows=rows)


def _in_parts(entry: Entry, parts: list[tuple[str, int]], names: Names) -> Iterator[Copy]:
    """A copy for each parameter, of its rows. Raises LoadError."""
    n_rows, first = sum(number for _, number in parts), 0
    if entry.shape[0] != n_rows or (len(entry.shape) == 1 and entry.dtype in DECODERS):
        raise LoadError(
            f"tensor {entry.name} is {entry.dtype} of shape {entry.shape}; config.json implies {n_rows} rows, and no"
            " blocks in one dimension"
        )
    row_bytes = entry.n_bytes // n_rows
    for name, number in parts:
        shape, start = (number, *entry.shape[1:]), entry.start + first * row_bytes
        own = f"{entry.name}[{first}:{first + number}]"
        part = msgspec.structs.replace(entry, name=own, shape=shape, start=start, n_bytes=number * row_bytes)
        yield Copy(part, name, rows=names.parameter(name)[1])
        first += number


def _refuse(what: str, names: list[str]) -> None:
    if names:
        more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
        raise LoadError(f"the checkpoint {what} {', '.join(shown(name) for name in names[:LISTED])}{more}")


def _stream(found: Found, targets: Targets, check_finite: bool, progress: bool | None) -> None:
    """Read all shards in the order of their bytes, plain tensors first; comparisons come last, when their targets are
    filled."""
    buffer, total = torch.empty(BUFFER_BYTES, dtype=torch.uint8), found.n_bytes
    disable = None if progress is None else not progress
    with contextlib.ExitStack() as stack:
        bar = stack.enter_context(tqdm(total=total, unit="B", unit_scale=True, desc="Loading weights", disable=disable))
        advance: Callable[[int], object] = bar.update
        if bar.disable:
            advance = stack.enter_context(ticking("loading weights", total, format_bytes)).advance
        for shard, entries in zip(found.shards, found.zeros, strict=False):
            _check_zeros(shard, entries, buffer, advance)
        for compare in (False, True):
            for shard, shard_copies in zip(found.shards, found.copies, strict=True):
                chosen = [copy for copy in shard_copies if copy.compare == compare]
                if chosen:
                    _read_tensors(shard, chosen, targets, buffer, check_finite, advance)
            for one in () if compare else found.coded:
                _read_coded(one, found.shards, targets, check_finite)
                advance(one.n_bytes)


def _check_zeros(shard: Shard, entries: list[Entry], buffer: torch.Tensor, advance: Callable[[int], object]) -> None:
    with open_shard(shard) as descriptor:
        for entry in entries:
            if any(bool(piece.any()) for _, piece in pieces(descriptor, entry, buffer, shard.path, None)):
                raise LoadError(
                    f"tensor {entry.name} in {shard.path} is not zero, and the model has no bias there: writers of GPTQ"
                    " add biases of zeros, but what this one adds would be left out"
                )
            advance(entry.n_bytes)


def _read_coded(one: CodedTensor, shards: list[Shard], targets: Targets, check_finite: bool) -> None:
    """One coded matrix, into what holds it or decoded; nothing of another rank's."""
    filling, target = targets.fillings.get(one.target), targets.tensors.get(one.target)
    if filling is None and target is None:
        return
    matrix = coded.read(one, shards, targets.regions.get(one.target))
    if filling is not None:
        coded.put(matrix, filling, one)
    elif target is not None:
        matrix.decode(target)
        if check_finite and not _is_finite(target):
            raise LoadError(f"{one.name} has NaN or infinite values as {target.dtype}")
        targets.filled(one.target)


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
                place, region = targets.places[copy.target], targets.regions.get(copy.target)
                for n_bytes in gguf_exact.fill(descriptor, copy.entry, place, copy.rows, shard.path, region):
                    advance(n_bytes if copy.target != TABLE else 0)
                if copy.target != TABLE:
                    targets.filled(copy.target)
                    continue
            if copy.target not in targets.tensors:  # another rank's
                advance(copy.entry.n_bytes)
                continue
            target, region = targets.tensors[copy.target], targets.regions.get(copy.target)
            alone = region if copy.compare or copy.rows.order is Order.ROWS else None
            found = pieces(descriptor, copy.entry, buffer, shard.path, alone)
            if copy.compare:
                _compare(target, copy, _counted(found, copy.entry, target.numel(), advance))
            elif alone is region:
                _write(target, _counted(found, copy.entry, target.numel(), advance))
                rearrange(target, copy.rows if region is None else copy.rows.of_part(len(target), copy.entry.shape[0]))
            else:
                whole = target.new_empty(stored_shape(copy.entry.shape, copy.rows))
                _write(whole, _counted(found, copy.entry, whole.numel(), advance))
                rearrange(whole, copy.rows)
                assert region is not None
                target.copy_(take(whole, region))
            if not copy.compare:
                targets.copied(copy)
            if check_finite and not _is_finite(target):
                raise LoadError(
                    f"tensor {copy.entry.name} in {shard.path} has NaN or infinite values as {target.dtype}"
                )
            targets.filled(copy.target)


def _counted(found: Pieces, entry: Entry, n_wanted: int, advance: Callable[[int], object]) -> Pieces:
    """Pieces of `n_wanted` numbers in all, which stand for all bytes of a tensor."""
    for start, piece in found:
        yield start, piece
        advance(len(piece) * entry.n_bytes // n_wanted)


def _write(target: torch.Tensor, found: Pieces) -> None:
    flat = target.view(-1)
    for start, piece in found:
        flat[start : start + len(piece)].copy_(piece)


def _compare(target: torch.Tensor, copy: Copy, found: Pieces) -> None:
    flat = target.view(-1)
    for start, piece in found:
        if not torch.equal(flat[start : start + len(piece)], piece.to(target.device, target.dtype)):
            raise LoadError(
                f"{copy.entry.name} differs from {copy.target}, but tie_word_embeddings is true in config.json"
            )


def _is_finite(values: torch.Tensor) -> bool:
    """One fast pass: the extremes are finite exactly if all values are (NaN propagates)."""
    low, high = torch.aminmax(values)
    return bool(torch.isfinite(low) & torch.isfinite(high))
