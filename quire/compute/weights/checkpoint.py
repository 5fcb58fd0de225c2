"""The weight files of a checkpoint folder: which they are, whether they are sound, and bounded reads from them.

Owns files and bytes; does not own dtypes' meaning or parameters. Files are read with ordinary reads, never mapped, so a
file that shrinks is an error and not a SIGBUS. Invariant: only regular files of the folder itself are opened (links to
regular files are followed, as the hub's cache consists of them); nothing is ever unpickled.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Iterator
from typing import Final

import msgspec

from quire.compute.weights.header import Entry, read_header
from quire.config.advice import listing
from quire.config.fields import read_object
from quire.core import files
from quire.core.errors import ConfigError, LoadError, shown

SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
PICKLED: Final = (".bin", ".pt", ".pth", ".ckpt")
MAX_SHARDS: Final = 4096

Signature = tuple[int, int, int]


class Shard(msgspec.Struct, frozen=True):
    """One safetensors file, its header checked."""

    path: pathlib.Path
    signature: Signature
    """Inode, size and modification time when the header was read."""
    entries: tuple[Entry, ...]


def open_checkpoint(folder: pathlib.Path) -> list[Shard]:
    """The shards of `folder`, every header read and checked, and the index (if any) checked against them.

    Raises LoadError: no safetensors, a missing or damaged file, an index that names what is not there, a tensor in two
    files.
    """
    names, index = _file_names(folder)
    shards = [_read_shard(folder / name) for name in names]
    homes: dict[str, str] = {}
    for shard in shards:
        for entry in shard.entries:
            if entry.name in homes:
                raise LoadError(f"tensor {shown(entry.name)} is in both {homes[entry.name]} and {shard.path.name}")
            homes[entry.name] = shard.path.name
    for tensor, file_name in index.items():
        if homes.get(tensor) != file_name:
            raise LoadError(f"{INDEX} places tensor {shown(tensor)} in {file_name}, which does not hold it")
    return shards


def _file_names(folder: pathlib.Path) -> tuple[list[str], dict[str, str]]:
    """(files to read, index or {}). As in transformers, a model.safetensors wins over an index."""
    if not folder.is_dir():
        raise LoadError(f"{folder} is not a folder")
    present = sorted(os.listdir(folder))
    if SINGLE in present:
        return [SINGLE], {}
    if INDEX in present:
        index = _read_index(folder / INDEX)
        return sorted(set(index.values())), index
    weights = [name for name in present if name.endswith(".safetensors")]
    if len(weights) == 1:
        return weights, {}
    pickled = [name for name in present if name.endswith(PICKLED)]
    if weights:
        reason = f"{len(weights)} .safetensors files but no {INDEX} that says how they belong together"
    elif pickled:
        reason = (
            f"only pickled weights ({pickled[0]}), which can run code when they are loaded and so are never read."
            " Take a revision of the model with *.safetensors, or convert it where you trust it, with transformers:"
            " AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER)"
        )
    else:
        reason = f"no .safetensors file beside config.json; it holds {listing(folder)}"
    raise LoadError(f"{folder} has {reason}")


def _read_index(path: pathlib.Path) -> dict[str, str]:
    try:
        weight_map = read_object(path).get("weight_map")
    except ConfigError as error:
        raise LoadError(error.message) from None
    if not isinstance(weight_map, dict) or not weight_map:
        raise LoadError(f"{path}: weight_map must map tensor names to files, not {shown(weight_map)}")
    for name in weight_map.values():
        if not isinstance(name, str) or not name.endswith(".safetensors") or pathlib.PurePath(name).name != name:
            raise LoadError(f"{path}: {shown(name)} must be the name of a .safetensors file of the same folder")
    if len(set(weight_map.values())) > MAX_SHARDS:
        raise LoadError(f"{path} names {len(set(weight_map.values())):,} files; the limit is {MAX_SHARDS:,}")
    return weight_map


def _read_shard(path: pathlib.Path) -> Shard:
    with open_regular(path) as descriptor, _reads(path):
        signature = _signature(descriptor)
        with open(descriptor, "rb", closefd=False) as file:
            entries = read_header(file, signature[1], str(path))
        return Shard(path, signature, tuple(entries))


@contextlib.contextmanager
def open_regular(path: pathlib.Path) -> Iterator[int]:
    """A descriptor of a regular file, closed at the end. Raises LoadError for a FIFO, device, folder or broken link."""
    try:
        descriptor = files.open_regular(path)
    except OSError as error:
        raise LoadError(f"cannot open {path}: {error.strerror}") from None
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def open_shard(shard: Shard) -> Iterator[int]:
    """A descriptor of the shard's file. Raises LoadError if it changed since its header was read or while open."""
    with open_regular(shard.path) as descriptor:
        _check_unchanged(shard, descriptor)
        with _reads(shard.path):
            yield descriptor
        _check_unchanged(shard, descriptor)


def read_into(descriptor: int, buffer: memoryview, offset: int, path: pathlib.Path) -> None:
    """Fill `buffer` from byte `offset` of the file. Raises LoadError if the file ends before."""
    filled = 0
    while filled < len(buffer):
        count = os.preadv(descriptor, [buffer[filled:]], offset + filled)
        if count == 0:
            raise LoadError(f"{path} ended at byte {offset + filled:,} while being read: it was truncated meanwhile")
        filled += count


def _signature(descriptor: int) -> Signature:
    status = os.fstat(descriptor)
    return status.st_ino, status.st_size, status.st_mtime_ns


def _check_unchanged(shard: Shard, descriptor: int) -> None:
    if _signature(descriptor) != shard.signature:
        raise LoadError(f"{shard.path} changed while being loaded; load it again when it is complete")


@contextlib.contextmanager
def _reads(path: pathlib.Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise LoadError(f"cannot read {path}: {error.strerror}") from None
