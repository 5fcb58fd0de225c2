"""What the files of a hub's model hold, from the headers of its safetensors alone: a few requests of a byte range.

Owns which bytes are asked for. Does not own the format (`header.py`) nor what a model is. No weight is fetched, and
nothing is written but the index of files, which the hub's library keeps.
Invariant: no more than a header is read of an answer, also from a server that ignores ranges.
"""

from __future__ import annotations

import concurrent.futures
import importlib
import io
import json
import pathlib
import re
import sys
from typing import Any, Final

import msgspec

from quire.compute.weights.header import ITEM_BITS, MAX_HEADER_BYTES, Entry, read_header
from quire.core.errors import LoadError, shown

FIRST_BYTES: Final = 100_000
"""Most headers are shorter, so that one request does."""
N_TOGETHER: Final = 8
"""Files that are asked for at a time."""
_PLAIN: Final = re.compile(r"[\w.-]+\.safetensors")
ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"


class HubFiles(msgspec.Struct, frozen=True, kw_only=True):
    """Of one model."""

    n_files: int
    n_bytes: int
    numbers: dict[str, int]
    """Type as the format calls it → numbers stored; packed ones count as what packs them."""

    @property
    def n_numbers(self) -> int:
        """Of all types."""
        return sum(self.numbers.values())

    @property
    def is_rounded(self) -> bool:
        """Whether it has types of fewer than 16 bits, or packed ones, so that its numbers are not its parameters."""
        return any(not dtype.startswith(("F", "BF")) or ITEM_BITS[dtype] < 16 for dtype in self.numbers)


def read_hub_files(model: str) -> HubFiles:
    """LoadError where there are no safetensors, where one is no such file, or the hub cannot be reached."""
    from huggingface_hub.errors import EntryNotFoundError

    try:
        try:
            read = [_read(model, ONE_FILE)]
        except EntryNotFoundError:
            names = _shards(model)
            with concurrent.futures.ThreadPoolExecutor(N_TOGETHER) as pool:
                read = list(pool.map(lambda name: _read(model, name), names))
    except EntryNotFoundError:
        raise LoadError(f"{shown(model)} has neither {ONE_FILE} nor {INDEX}") from None
    except network_errors() as error:
        reason = str(error).splitlines()[0] if str(error) else ""
        raise LoadError(
            f"the headers of {shown(model)} cannot be read from the hub: {type(error).__name__} {shown(reason)}"
        ) from None
    numbers: dict[str, int] = {}
    for _, entries in read:
        for entry in entries:
            numbers[entry.dtype] = numbers.get(entry.dtype, 0) + entry.n_bytes * 8 // ITEM_BITS[entry.dtype]
    return HubFiles(n_files=len(read), n_bytes=sum(size for size, _ in read), numbers=numbers)


def network_errors() -> tuple[type[Exception], ...]:
    """What the HTTP library of the hub's own library raises: another one in each of its versions."""
    session = importlib.import_module("huggingface_hub.utils").get_session()
    return OSError, sys.modules[type(session).__module__.partition(".")[0]].HTTPError


def _shards(model: str) -> list[str]:
    import huggingface_hub

    text = pathlib.Path(huggingface_hub.hf_hub_download(model, INDEX)).read_bytes()
    try:
        names = sorted(set(json.loads(text)["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise LoadError(f"{INDEX} of {shown(model)} has no weight_map of files") from None
    if not names or not all(isinstance(name, str) and _PLAIN.fullmatch(name) for name in names):
        raise LoadError(f"{INDEX} of {shown(model)} names files that are no safetensors beside it")
    return names


def _read(model: str, name: str) -> tuple[int, list[Entry]]:
    """(bytes of the file, its tensors)."""
    import huggingface_hub

    url = huggingface_hub.hf_hub_url(model, name)
    n_bytes = huggingface_hub.get_hf_file_metadata(url).size
    where = f"{name} of {shown(model)}"
    if n_bytes is None:
        raise LoadError(f"the hub does not say how large {where} is")
    begin = _range(url, 0, min(FIRST_BYTES, n_bytes))
    n_header = 8 + int.from_bytes(begin[:8], "little")
    if len(begin) < n_header <= min(n_bytes, 8 + MAX_HEADER_BYTES):
        begin += _range(url, len(begin), n_header)
    return n_bytes, read_header(io.BytesIO(begin), n_bytes, where)


def _range(url: str, first: int, end: int) -> bytes:
    """Bytes first, ..., end - 1 of a file, whether or not the server knows ranges."""
    utils: Any = importlib.import_module("huggingface_hub.utils")
    headers: dict[str, Any] = {
        **utils.build_hf_headers(),
        "Range": f"bytes={first}-{end - 1}",
        "Accept-Encoding": "identity",
    }
    with utils.get_session().stream("GET", url, headers=headers, follow_redirects=True) as answer:
        utils.hf_raise_for_status(answer)
        skipped = first if answer.status_code != 206 else 0
        found = b""
        for piece in answer.iter_bytes():
            found += piece
            if len(found) >= skipped + end - first:
                break
    return found[skipped : skipped + end - first]
