"""Coded matrices of a checkpoint: which tensors belong to one, whether they fit it, and their way into the parameters.

Owns the match of a matrix's tensors by names, the checks of their shapes, and what becomes of them: put into the
product that holds them as they are, or decoded into the floating matrix. Does not own layouts (`codings`), schemes
(`schemes`) or plain tensors (`loader`). Invariant: everything but numbers is checked from headers.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final

import msgspec
import torch

from quire.compute.layers.linear import Linear
from quire.compute.models.decoder import Decoder
from quire.compute.schemes.coded import PIECE_VALUES, Coded, Source
from quire.compute.schemes.scheme import FilledScheme, MatrixScheme, Product
from quire.compute.weights.checkpoint import Shard, open_shard, read_into
from quire.compute.weights.codings import READERS
from quire.compute.weights.codings.scaled import INPUTS
from quire.compute.weights.header import Entry
from quire.compute.weights.names import Names, Rows, rearrange
from quire.compute.weights.pieces import TORCH_DTYPES
from quire.config.arch import ModelArch
from quire.config.codings import Coding, Codings, Layout
from quire.config.families import Order
from quire.config.shares import Region
from quire.core.errors import LoadError, shown

DTYPES: Final = TORCH_DTYPES | {
    "I8": torch.int8, "U8": torch.uint8, "I32": torch.int32, "I64": torch.int64, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip
WEIGHT: Final = "weight"
BESIDE: Final = (".k_scale", ".v_scale", ".q_scale", ".kv_scale", ".output_scale", ".prob_scale")
"""Ends of tensors that are no weights: scales of quantised caches (`kv_scales` reads them) or outputs."""

Part = tuple[int, Entry]
"""(number of the shard, tensor)."""


class CodedTensor(msgspec.Struct, frozen=True):
    """One coded matrix of a checkpoint."""

    name: str
    """Of its module."""
    target: str
    """Name among the model's weights."""
    coding: Coding
    parts: dict[str, Part]
    """By kind."""
    shape: tuple[int, int]
    rows: Rows

    @property
    def n_bytes(self) -> int:
        """In the file."""
        return sum(entry.n_bytes for _, entry in self.parts.values())

    @property
    def scratch_bytes(self) -> int:
        """Memory that reading takes beside where it goes: its tensors, and its codes in bytes, perhaps in another
        order too, and a piece of its numbers with their scales."""
        n_values = math.prod(self.shape)
        return self.n_bytes + 2 * n_values + 3 * 4 * max(min(n_values, PIECE_VALUES), self.shape[1])

    @property
    def order(self) -> torch.Tensor | None:
        """See `order_of`."""
        return order_of(self.rows, self.shape[0])

    @property
    def source(self) -> Source:
        """For the choice of a scheme."""
        scales = (entry.dtype for kind, (_, entry) in self.parts.items() if "scale" in kind and "input" not in kind)
        return Source(self.coding, next(scales, ""), self.order)


def order_of(rows: Rows, n: int) -> torch.Tensor | None:
    """int64 [n]: which of the file's outputs each of the parameter's is; None: the same."""
    if rows.is_ours:
        return None
    numbers = torch.arange(n).unsqueeze(1)
    rearrange(numbers, rows)
    return numbers.squeeze(1)


@dataclasses.dataclass(frozen=True, slots=True)
class Filling:
    """Where a coded matrix goes as it is."""

    scheme: FilledScheme
    product: Product
    first_row: int


def gather(
    shards: Sequence[Shard], names: Names, arch: ModelArch, places: Mapping[str, torch.Tensor]
) -> tuple[list[CodedTensor], list[list[Entry]], list[list[Entry]]]:
    """(coded matrices in the order of the files, the other tensors of each shard, those of them that must be zero).

    places: name → parameter of the whole model. Raises LoadError where tensors do not make a matrix of the model.
    """
    codings = arch.codings
    if codings is None:
        return [], [list(shard.entries) for shard in shards], []
    kinds = _suffixes(codings)
    found: dict[str, dict[str, Part]] = collections.defaultdict(dict)
    others: list[list[Entry]] = []
    for number, shard in enumerate(shards):
        rest = []
        for entry in shard.entries:
            split = _split(entry, kinds)
            if split is not None:
                found[split[0]][split[1]] = number, entry
            elif not entry.name.endswith(BESIDE):
                rest.append(entry)
        others.append(rest)
    added: list[list[Entry]] = [[] for _ in others]
    if any(rule.coding.layout is Layout.GPTQ for rule in codings.rules):  # old writers add a bias of zeros to each
        added = [[entry for entry in rest if _is_added_bias(entry, found, names, places)] for rest in others]
        names_of = {entry.name for entries in added for entry in entries}
        others = [[entry for entry in rest if entry.name not in names_of] for rest in others]
    coded = [one for name, parts in found.items() for one in _tensors(name, parts, codings, names, places)]
    coded.sort(key=lambda one: min((number, entry.start) for number, entry in one.parts.values()))
    return coded, others, added


def _suffixes(codings: Codings) -> list[tuple[str, str]]:
    """(end of a name, kind), the longest first."""
    kinds = {kind for rule in codings.rules for kind in READERS[rule.coding.layout].kinds}
    ends = ((kind if kind.startswith("_") else f".{kind}", kind) for kind in kinds)
    return sorted(ends, key=lambda one: -len(one[0]))


def _split(entry: Entry, kinds: list[tuple[str, str]]) -> tuple[str, str] | None:
    """(name of the module, kind) of a tensor that is coded."""
    for suffix, kind in kinds:
        if entry.name.endswith(suffix) and not (kind == WEIGHT and entry.dtype in TORCH_DTYPES):
            return entry.name.removesuffix(suffix), kind
    return None


def _is_added_bias(entry: Entry, found: Mapping[str, object], names: Names, places: Mapping[str, torch.Tensor]) -> bool:
    stem, _, kind = entry.name.rpartition(".")
    return kind == "bias" and stem in found and names.parameter(entry.name)[0] not in places


def _tensors(
    name: str, parts: dict[str, Part], codings: Codings, names: Names, places: Mapping[str, torch.Tensor]
) -> Iterator[CodedTensor]:
    """The matrices of one module: one, or one of each expert. Raises LoadError."""
    if names.is_left_out(f"{name}.{WEIGHT}"):
        return
    coding = codings.of(name)
    if coding is None:
        raise LoadError(f"{shown(name)} is quantised, but no group of quantization_config has it as a target")
    lacking = [kind for kind in READERS[coding.layout].needed(coding) if kind not in parts]
    if lacking:
        held = ", ".join(f"{kind} of {entry.dtype}" for kind, (_, entry) in parts.items())
        raise LoadError(
            f"the checkpoint has {held} of {shown(name)}, but not {', '.join(lacking)}, which {coding.words} needs"
        )
    stack = names.of_experts(name)
    if stack is None:
        target, rows = names.parameter(f"{name}.{WEIGHT}")
        yield _tensor(name, target, coding, parts, places, rows)
        return
    for expert, target in enumerate(stack[0]):
        own = {kind: (number, _of_expert(entry, expert, len(stack[0]))) for kind, (number, entry) in parts.items()}
        yield _tensor(f"{name}[{expert}]", target, coding, own, places, stack[1])


def _of_expert(entry: Entry, expert: int, n_experts: int) -> Entry:
    """Its part of a tensor. Raises LoadError."""
    if not entry.shape or entry.shape[0] != n_experts:
        raise LoadError(
            f"tensor {entry.name} has shape {entry.shape}; config.json implies {n_experts} experts in its first"
            " dimension"
        )
    n_bytes = entry.n_bytes // n_experts
    return msgspec.structs.replace(
        entry, name=f"{entry.name}[{expert}]", shape=entry.shape[1:], start=entry.start + expert * n_bytes,
        n_bytes=n_bytes,
    )  # fmt: skip


def _tensor(
    name: str, target: str, coding: Coding, parts: dict[str, Part], places: Mapping[str, torch.Tensor], rows: Rows
) -> CodedTensor:
    """Checked against the parameter. Raises LoadError."""
    if target not in places or places[target].dim() != 2:
        raise LoadError(f"the checkpoint has a quantised {shown(name)}, and the model no matrix of that name")
    n, k = places[target].shape
    reader, entries = READERS[coding.layout], {kind: entry for kind, (_, entry) in parts.items()}
    for kind, (shapes, dtypes) in reader.allowed(coding, n, k).items():
        if kind not in entries:
            continue
        entry = entries[kind]
        if entry.shape not in shapes:
            expected = " or ".join(str(shape) for shape in shapes)
            raise LoadError(
                f"tensor {entry.name} has shape {entry.shape}; a matrix {[n, k]} in {coding.words} implies {expected}"
            )
        if entry.dtype not in dtypes:
            raise LoadError(
                f"tensor {entry.name} has dtype {entry.dtype}; {coding.words} implies {' or '.join(dtypes)}"
            )
    wrong = reader.more(coding, entries, n, k)
    if wrong:
        raise LoadError(f"{shown(name)}: {wrong}")
    return CodedTensor(name, target, coding, parts, (n, k), with_rows(rows))


def with_rows(rows: Rows) -> Rows:
    """Codings have outputs as rows, whatever a family's floating checkpoints have."""
    return msgspec.structs.replace(rows, order=Order.ROWS) if rows.order is Order.TRANSPOSED else rows


def fillings(model: Decoder) -> dict[str, Filling]:
    """Name of a parameter, or of several as one → where its codes go, of each matrix of `model` that holds them."""
    found: dict[str, Filling] = {}
    for linear in model.linears():
        if isinstance(linear.scheme, FilledScheme):
            found |= _of_linear(linear, linear.scheme)
    return found


def _of_linear(linear: Linear, scheme: FilledScheme) -> dict[str, Filling]:
    found: dict[str, Filling] = {}
    first_row = 0
    for name, n_rows in linear.matrix.parts:
        found[f"{name}.{WEIGHT}"] = Filling(scheme, linear.product, first_row)
        first_row += n_rows
    if linear.matrix.whole:
        found[f"{linear.matrix.whole}.{WEIGHT}"] = Filling(scheme, linear.product, 0)
    return found


def read(one: CodedTensor, shards: Sequence[Shard], region: Region | None) -> Coded:
    """The matrix in the order of the parameter's rows, or the part of it that a rank has. Raises LoadError."""
    tensors = {}
    for kind, (number, entry) in one.parts.items():
        if entry.dtype in DTYPES:
            with open_shard(shards[number]) as descriptor:
                raw = torch.empty(entry.n_bytes, dtype=torch.uint8)
                read_into(descriptor, raw.numpy().data, entry.start, shards[number].path)
            tensors[kind] = raw.view(DTYPES[entry.dtype]).view(entry.shape)
    try:
        coded = READERS[one.coding.layout].read(one.coding, tensors, *one.shape)
    except ValueError as error:
        raise LoadError(f"{shown(one.name)}: {error}") from None
    return part_of(coded, region, one.order)


def part_of(coded: Coded, region: Region | None, order: torch.Tensor | None = None) -> Coded:
    """What a rank has of a matrix, its rows in `order`; None: all, as they are."""
    if region is None:
        return coded.part(order, None)
    own = torch.cat([torch.arange(first, first + number) for first, number in region.rows])
    return coded.part(own if order is None else order[own], region.columns)


def put(coded: Coded, filling: Filling, one: CodedTensor) -> None:
    """Fill a matrix's rows with codes as they are. Raises LoadError."""
    if not bool(coded.scales.float().isfinite().all()):
        raise LoadError(f"{shown(one.name)} has NaN or infinite scales")
    try:
        filling.scheme.put(filling.product, filling.first_row, coded)
    except ValueError as error:
        raise LoadError(f"{shown(one.name)}: {error}; --quantization none decodes it instead") from None
    if one.coding.static_inputs and coded.input_scale is not None:
        _check_input_scale(float(coded.input_scale), one)


def _check_input_scale(scale: float, one: CodedTensor) -> None:
    if not 0 < scale < math.inf:
        tensor = next(entry.name for kind, (_, entry) in one.parts.items() if kind in INPUTS)
        raise LoadError(
            f"tensor {tensor} is {scale:g}: what its matrix multiplies is rounded with it, so it must be a finite"
            " number above 0; --quantization none does not use it"
        )


def words(found: Mapping[str, Coding], fillings: Mapping[str, Filling], otherwise: str) -> str:
    """What becomes of coded matrices, by their names, for people. otherwise: of those that nothing holds."""
    counts = collections.Counter(
        f"in {coding.words} " + (f"kept as {fillings[name].scheme.name}" if name in fillings else otherwise)
        for name, coding in found.items()
    )
    return "; ".join(f"{number:,} matrices {what}" for what, number in counts.items())


def rounded(found: Collection[str], model: Decoder, scheme: MatrixScheme) -> tuple[int, int]:
    """Matrices of a checkpoint that `scheme` rounds: (coded ones, `found`, which were rounded before; others)."""
    n_again = n_others = 0
    for linear in model.linears():
        if linear.scheme == scheme:
            names = {f"{name}.{WEIGHT}" for name, _ in linear.matrix.parts}
            whole = f"{linear.matrix.whole}.{WEIGHT}"
            n_coded = 1 if whole in found else sum(name in found for name in names)
            n_again += n_coded
            n_others += 0 if whole in found else len(names) - n_coded
    return n_again, n_others
