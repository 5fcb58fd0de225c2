"""An adapter from its folder: what its tensors are to the model's matrices, checked before memory is taken.

Owns the names and shapes of PEFT's files. Does not own the keys of its configuration (`config/adapter`) nor how
matrices are kept (`places`). Invariant: whatever the files hold, the answer is an adapter that fits, or a LoadError or
ConfigError that names what does not; nothing outside of the folder that was allowed is read.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import pathlib
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Final

import torch

from quire.compute.adapters.expert_files import StoredPair, stacks_of
from quire.compute.adapters.pairs import TENSOR_NAME, Pair, Target, check_dtype, finite_tensor, upright
from quire.compute.weights.header import Entry, read_header
from quire.compute.weights.names import Names, Rows, rearrange
from quire.compute.weights.pieces import take
from quire.config.adapter import CONFIG, MAX_CONFIG_BYTES, AdapterConfig, parse_adapter_config
from quire.config.arch import ModelArch
from quire.config.parameters import HEAD, layer_parameters, shapes
from quire.config.shares import Region
from quire.core.errors import ConfigError, LoadError, shown
from quire.core.files import read_regular

if TYPE_CHECKING:
    from quire.compute.models.decoder import Decoder

WEIGHTS: Final = "adapter_model.safetensors"
MAX_HEADER_BYTES: Final = 64 << 20
LISTED: Final = 5


@dataclasses.dataclass(frozen=True, slots=True)
class Adapter:
    """Of the projections of a model, by name; of several ranks', this rank's parts."""

    pairs: Mapping[str, Pair]
    content_id: str
    """Hash of both files."""
    rank: int
    """The largest."""


def targets_of(model: Decoder, *, with_experts: bool) -> dict[str, Target]:
    """Name of a parameter, without its kind → what it is of, in the whole model; of all experts
    and layers, whoever has them."""
    found: dict[str, Target] = {}
    cuts, whole = model.parts.cuts(), model.parts.whole
    matrices = [cuts.get(linear.matrix.name, (linear.matrix, None))[0] for linear in model.adaptable_of_all()]
    for number, spec in enumerate(whole.layers if with_experts else ()):
        ffn = layer_parameters(spec, whole.hidden_size, number).ffn
        matrices += [matrix for matrix in ffn.matrices.values() if matrix.bank]
    for matrix in matrices:
        found |= {name: Target(((name, rows),), matrix.n_in) for name, rows in matrix.parts}
        if matrix.whole:
            found[matrix.whole] = Target(matrix.parts, matrix.n_in)
    return found


def inside(path: str, root: str) -> pathlib.Path:
    """The folder that `path`, which may be relative to `root`, is; ConfigError unless it lies in there, links followed.
    root: empty: it may lie anywhere. In what the operator wrote, `root` and a `path` without one, `~` is a home."""
    try:
        allowed = pathlib.Path(root).expanduser().resolve(strict=True) if root else None
        found = (pathlib.Path(path).expanduser() if allowed is None else allowed / path).resolve(strict=True)
    except (OSError, RuntimeError, ValueError) as error:  # not there, a loop of links, nobody's home, a null byte
        reason = getattr(error, "strerror", None) or "it is no path"
        raise ConfigError(f"lora_path = {shown(path)} cannot be read: {reason}", param="lora_path") from None
    if allowed is not None and not found.is_relative_to(allowed):
        raise ConfigError(f"lora_path = {shown(path)} is not inside the folder of --lora-root", param="lora_path")
    if not found.is_dir():
        raise ConfigError(f"lora_path = {shown(path)} is not a folder", param="lora_path")
    return found


def read_adapter(path: str, root: str, model: Decoder, max_rank: int, *, with_experts: bool = False) -> Adapter:
    """Of a folder in PEFT's layout, for `model`. root: as `inside`; with_experts: it may be of experts too. Raises
    LoadError and ConfigError."""
    folder = inside(path, root)
    files = [folder / name for name in (CONFIG, WEIGHTS)]
    allowed = pathlib.Path(root).expanduser().resolve()
    for file in files:
        if file.exists() and root and not file.resolve().is_relative_to(allowed):
            raise ConfigError(f"{file} is a link that leads out of the folder of --lora-root", param="lora_path")
    text = read_file(files[0], MAX_CONFIG_BYTES)
    config = parse_adapter_config(text, files[0], max_rank, with_experts=with_experts)
    targets = targets_of(model, with_experts=with_experts)
    content = _content(folder, files[1], targets, max_rank)
    entries = read_header(io.BytesIO(content), len(content), str(files[1]))
    names, where = Names(model.parts.whole, in_gguf=False), str(files[1])
    stacks, rest = stacks_of(entries, config, targets, names, where)
    places = _places(rest, config, targets, names, where, is_all=not stacks)
    _check_once(places, stacks, where)
    held = {name for linear in model.linears() for name, _ in linear.matrix.parts}
    pairs = dict(_pairs(content, places, config, where, held))
    for stack in stacks:
        pairs.update(stack.pairs(content, config, where, held))
    _check_range(pairs, model.dtype, where)
    rank = max(config.rank_of(one.module) for one in (*places, *(stack.experts for stack in stacks)) if one is not None)
    digest = hashlib.blake2b(text, digest_size=16)  # the very bytes that were read above
    digest.update(content)
    return Adapter(_of_rank(pairs, model), digest.hexdigest(), rank)


def _content(folder: pathlib.Path, file: pathlib.Path, targets: Mapping[str, Target], max_rank: int) -> bytes:
    """Of the weights, which are as many bytes as any adapter for these targets can have, at most."""
    most = MAX_HEADER_BYTES + 8 * max_rank * sum(one.n_in + one.n_out for one in targets.values())
    if not file.exists() and (folder / "adapter_model.bin").exists():
        raise LoadError(f"{folder} has pickled weights only, which can run code: save it with safe_serialization=True")
    return read_file(file, most)


def read_file(file: pathlib.Path, most: int) -> bytes:
    """Of a regular file of at most so many bytes. Raises LoadError."""
    try:
        return read_regular(file, most)
    except OSError as error:
        raise LoadError(f"cannot read {file}: {error.strerror}") from None


@dataclasses.dataclass(slots=True)
class _Place:
    """Both tensors of a module, and where they go."""

    module: str
    target: Target
    rows: Rows
    entries: dict[str, Entry] = dataclasses.field(default_factory=dict)


def _places(
    entries: list[Entry],
    config: AdapterConfig,
    targets: Mapping[str, Target],
    names: Names,
    where: str,
    *,
    is_all: bool,
) -> list[_Place]:
    """Raises LoadError for names, shapes and types that do not fit. is_all: there is nothing beside."""
    found: dict[str, _Place] = {}
    for entry in entries:
        match = TENSOR_NAME.match(entry.name)
        if match is None:
            raise LoadError(f"{where}: tensor {shown(entry.name)} is none of a LoRA adapter (lora_A, lora_B)")
        module, kind = match.groups()
        if kind not in "AB":
            raise LoadError(f"{where}: {shown(entry.name)}: adapters of embeddings, and DoRA, are not applied")
        if module not in found:
            parameter, rows = names.parameter(f"{module}.weight")
            target = targets.get(parameter.removesuffix(".weight"))
            if target is None:
                raise LoadError(f"{where}: {shown(entry.name)}: {_no_target(parameter, names.arch)}")
            if not config.is_target(module):
                raise LoadError(f"{where}: {shown(entry.name)} is none of target_modules in {CONFIG}")
            found[module] = _Place(module, target, rows)
        if kind in found[module].entries:
            raise LoadError(f"{where}: module {shown(module)} has lora_{kind} twice")
        found[module].entries[kind] = entry
    if not found and is_all:
        raise LoadError(f"{where} has no tensors")
    absent = [one for one in config.targets or () if not any(m == one or m.endswith("." + one) for m in found)]
    if absent and not config.excludes:
        raise LoadError(f"{where} has nothing for {', '.join(map(shown, absent[:LISTED]))} of target_modules")
    for place in found.values():
        _check_shapes(place, config, where)
    return list(found.values())


def _no_target(parameter: str, arch: ModelArch) -> str:
    """Why nothing can be added to it."""
    if parameter.startswith(HEAD) or "embed" in parameter:
        return "adapters of the embedding and the head are not applied"
    if ".experts." in parameter:
        return "adapters of experts are applied by an engine with --lora-experts alone, to matrices of that shape"
    if any(name == parameter for name, _ in shapes(arch)):
        return "adapters of this matrix are not applied: routers, and what makes keys and values of latent attention"
    return "the model has no such linear layer"


def _check_shapes(place: _Place, config: AdapterConfig, where: str) -> None:
    rank, n_rows = config.rank_of(place.module), place.target.n_out
    for kind, shape in (("A", (rank, place.target.n_in)), ("B", (n_rows, rank))):
        entry = place.entries.get(kind)
        if entry is None:
            raise LoadError(f"{where}: module {shown(place.module)} has no lora_{kind}")
        if entry.shape != shape:
            raise LoadError(
                f"{where}: {shown(entry.name)} has shape {entry.shape}; {CONFIG} and the model imply {shape}"
            )
        check_dtype(entry, where)


def _check_once(places: list[_Place], stacks: list[StoredPair], where: str) -> None:
    """LoadError if a projection has two adapters, on whatever rank."""
    found: set[str] = set()
    of_stacks = [(one.module, target) for one in stacks if one.experts is not None for target in one.experts.targets]
    for module, target in (*((one.module, one.target) for one in places), *of_stacks):
        names = {name for name, _ in target.parts}
        if names & found:
            raise LoadError(f"{where}: {shown(module)}: the projection has an adapter already")
        found |= names


def _pairs(
    content: bytes, places: list[_Place], config: AdapterConfig, where: str, held: Collection[str]
) -> Iterator[tuple[str, Pair]]:
    """(name of a projection, what is added to it) of those in `held`; all are looked at. Raises LoadError."""
    for place in places:
        a, b = (finite_tensor(content, place.entries[kind], where) for kind in "AB")
        b = b * config.scale_of(place.module)
        rearrange(b, upright(place.rows))
        start = 0
        for name, rows in place.target.parts:
            if name in held:
                yield name, Pair(a, b[start : start + rows].contiguous())
            start += rows


def _check_range(pairs: Mapping[str, Pair], dtype: torch.dtype, where: str) -> None:
    """LoadError for numbers beyond those of the model's dtype: they would be infinite there."""
    most = torch.finfo(dtype).max
    for name, pair in pairs.items():
        for kind, numbers in (("lora_A", pair.a), ("lora_B with its scale", pair.b)):
            if not (found := float(numbers.abs().max())) <= most:
                raise LoadError(
                    f"{where}: {kind} of {shown(name)} reaches {found:g}, and {str(dtype).removeprefix('torch.')} ends"
                    f" at {most:g}: lower lora_alpha in {CONFIG}, or take a --dtype with more"
                )


def _of_rank(pairs: dict[str, Pair], model: Decoder) -> dict[str, Pair]:
    """What a rank adds to its products, cut as these are: B where outputs are divided; A where inputs are, as what B
    makes of the ranks' terms has their sum."""
    found = dict(pairs)
    for whole, mine in model.parts.cuts().values():
        n_in, first = mine.matrix.n_in, mine.first_column
        for (name, _), rows in zip(whole.parts, mine.rows, strict=True):
            if (pair := found.get(name)) is not None:
                a = pair.a if n_in == whole.n_in else pair.a[:, first : first + n_in].contiguous()
                found[name] = Pair(a, take(pair.b, Region(rows)))
    return found
