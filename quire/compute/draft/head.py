"""A head on its device: its parameters from a checkpoint, and one step of it operation by operation.

Owns its data flow, the oracle of `head_steps.NativeSteps`. Does not own how heads differ (`config/heads`), pages, nor
when it is asked (`eagle.py`).
Invariant: of several ranks each has its part of the layer and some rows of table and output matrix, as of the model; so
all have the same states and logits, to the bit.
Row p reads the embedding of token p and the feature of token p - 1 (Li et al. 2025, arXiv 2503.01840, figure 5;
DeepSeek-V3, arXiv 2412.19437, figure 3).
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Final

import msgspec
import numpy as np
import torch

from quire.compute.dist.added import RankSum
from quire.compute.dist.comm import Comm, SoloComm
from quire.compute.layers.attention import Attention
from quire.compute.layers.context import Context
from quire.compute.layers.decoder_layer import DecoderLayer
from quire.compute.layers.linear import Embedding, Linear, Make
from quire.compute.layers.norm import Norm
from quire.compute.layers.rotary import rotary_tables
from quire.compute.layers.vocabulary import DividedEmbedding, DividedHead
from quire.compute.models.decoder import Decoder
from quire.compute.models.rank_parts import RankParts
from quire.compute.schemes.choice import floating, schemes_on
from quire.compute.schemes.packed import Scheme
from quire.compute.schemes.scheme import FilledScheme, MatrixScheme
from quire.compute.weights.checkpoint import Shard, open_checkpoint, open_shard, read_into
from quire.compute.weights.names import Names, Rows, rearrange, stored_shape
from quire.compute.weights.pieces import TORCH_DTYPES, take
from quire.config.heads import N_TAPS, HeadArch
from quire.config.layers import NormSpec
from quire.config.parameters import LAYER, Cut, Matrix, NormTable, embedding
from quire.config.shares import Region, share
from quire.core.errors import LoadError, shown
from quire.kernels import gemm

DTYPES: Final = TORCH_DTYPES | {"I64": torch.int64, "I32": torch.int32, "BOOL": torch.bool}
NOWHERE: Final = torch.device("meta")
IN_LAYER: Final = LAYER.format(0)
"""Of the names of the layer's parameters."""


class Head:
    """Parameters in the model's dtype, matrices as `scheme` keeps them. model: that it guesses for, whose final norm,
    table and output matrix it uses where it has none of its own. comm: of the ranks that share the model's layers,
    None: it is whole. Raises ConfigError where it cannot be divided."""

    def __init__(
        self,
        arch: HeadArch,
        model: Decoder,
        make: Make,
        device: torch.device,
        scheme: MatrixScheme,
        comm: Comm | None = None,
    ) -> None:
        self.arch, self.dtype, self._comm = arch, model.dtype, SoloComm() if comm is None else comm
        own, layout, schemes = arch.arch, arch.layout, schemes_on(device, model.dtype, scheme)
        hidden, parts = own.hidden_size, RankParts(own, schemes, self._comm.rank, self._comm.size)
        self.part: Final = parts.arch
        """What this rank computes of its layer."""
        self._regions = parts.regions()
        spec = self.part.layers[0]

        def linear(n_in: int, *parts: tuple[str, int]) -> Linear:
            return Linear(make, Matrix(n_in=n_in, parts=parts), scheme)

        def norm(name: str, spec: NormSpec = spec.norm) -> Norm:
            return Norm(make, NormTable(name=name, shape=(hidden,), spec=spec))

        self.layer = DecoderLayer(spec, parts.layers[0], 0, make, schemes, torch.empty(0, device=device))
        self.joins = [linear(hidden, (layout.taps, hidden)) for _ in range(N_TAPS if layout.taps else 0)]
        """The columns of the matrix that joins states, for each."""
        self.makes_input = bool(layout.join)
        """Token and feature give the layer's input; otherwise its queries, keys and values, beside the feature."""
        first = self.layer.attention_norm
        if self.makes_input:
            self.embedded, self.feature = (linear(hidden, (layout.join, hidden)) for _ in range(2))
        else:
            assert isinstance(self.layer.mixer, Attention), "config/eagle takes no other"
            self.embedded, self.feature = self.layer.mixer.qkv, linear(hidden, *self.layer.mixer.qkv.matrix.parts)
        """The columns of a matrix for the embedding, and for the feature."""
        self.embedded_norm = norm(layout.embedded_norm) if layout.embedded_norm or first is None else first
        self.feature_norm, self.norm = norm(layout.feature_norm), norm(layout.norm, own.norm)
        self.head = model.head
        if layout.head:
            whole = Matrix(n_in=hidden, parts=((layout.head, own.vocab_size),), cut=Cut.VOCABULARY)
            mine = scheme.cut(whole, self._comm.rank, self._comm.size)
            self.head = Linear(make, mine.matrix, scheme)
            self._regions[f"{layout.head}.weight"] = Region(mine.rows[0])
        self._project: Linear | DividedHead = self.head
        if self.n_ranks > 1:
            self._project = DividedHead(self.head, own.vocab_size, self._comm)
            self.layer.sum_over(RankSum(self._comm))
        self.model_norm = model.norm if layout.reads_normed else None
        """What the model's states go through before they are read."""
        self.embed, self.has_embedding = model.embed, False
        self.token_ids = np.arange(own.vocab_size, dtype=np.int32)
        """int32 [its vocabulary]: the model's ids."""
        self._device = device

    def reach(self, max_model_len: int) -> None:
        """Make the rotary table for so many positions."""
        tables = rotary_tables(self.arch.arch, max_model_len)
        self.layer.mixer.cos_sin = tables[self.layer.spec.mixer.rope].to(self._device)

    def forward(
        self,
        token_ids: torch.Tensor,
        features: torch.Tensor,
        positions: torch.Tensor,
        context: Context,
        wanted: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """token_ids, positions: [n]; features: [n, hidden], not used afterwards; wanted: int64 [m], rows, None: all →
        their states [m, hidden] and logits [m, its vocabulary], in `out` if given, else float32."""
        joined = self.embedded(self.embed(token_ids), norm=self.embedded_norm.pair)
        joined = self.feature(features, norm=self.feature_norm.pair, residual=joined)
        if self.makes_input:
            x = self.layer(joined, positions, context, wanted)
        else:
            assert isinstance(self.layer.mixer, Attention)
            x = self.layer.behind(self.layer.mixer.mix(joined, positions, context), features, wanted)
        if out is None:
            out = torch.empty((len(x), len(self.token_ids)), dtype=torch.float32, device=x.device)
        return x, self._project(x, norm=self.norm.pair, out=out)

    def chained(self, states: torch.Tensor) -> torch.Tensor:
        """The features of the next guesses, where these states are the newest."""
        return self.norm(states) if self.makes_input else states

    def build_kernels(self, max_rows: int) -> None:
        """As `Decoder.build_kernels`, for guesses."""
        products = [self.embedded.kernel(norm=True), self.feature.kernel(norm=True, residual=True)]
        products += [self.head.kernel(norm=True, wide=wide) for wide in (False, True)]
        gemm.build([*products, *self.layer.kernels()], self.dtype, self._device, max_rows)
        self.layer.ffn.build(max_rows)

    def build_joins(self, max_rows: int) -> None:
        """The same for what the model's own steps call."""
        joins = [join.kernel(residual=place > 0) for place, join in enumerate(self.joins)]
        gemm.build(joins, self.dtype, self._device, max_rows)

    @property
    def n_ranks(self) -> int:
        """That share it."""
        return self._comm.size

    @property
    def linears(self) -> list[Linear]:
        """All matrices of its own, those of one name in the order of their columns."""
        sides = [self.embedded, self.feature]
        own = [*self.joins, *(reversed(sides) if self.arch.layout.feature_first else sides), *self.layer.linears]
        return list(dict.fromkeys([*own, self.head] if self.arch.layout.head else own))

    @property
    def norms(self) -> list[Norm]:
        """All of its own."""
        return list(dict.fromkeys([self.embedded_norm, self.feature_norm, *self.layer.norms, self.norm]))

    @property
    def n_bytes(self) -> int:
        """Of its parameters on this rank, the model's left out."""
        tensors = [tensor for norm in self.norms for tensor in norm.tensors]
        tensors += [table.values for table in self.layer.tables]
        own = sum(linear.n_bytes for linear in self.linears) + sum(tensor.nbytes for tensor in tensors)
        return own + (self.embed.weight.nbytes if self.has_embedding else 0)

    def leave_device(self) -> None:
        """Into the host's memory, as `Decoder`; but for the rotary table, which `reach` makes anew."""
        self.layer.mixer.cos_sin = torch.empty(0, device=self._device)
        self._move(torch.device("cpu"))

    def enter_device(self) -> None:
        """Back."""
        self._move(self._device)

    def _move(self, device: torch.device) -> None:
        """Tensors stay the same objects."""
        tensors = [tensor for norm in self.norms for tensor in norm.tensors]
        tensors += [*self.layer.tensors(), *(table.values for table in self.layer.tables)]
        tensors += [tensor for linear in self.linears for tensor in linear.tensors()]
        if self.has_embedding:
            tensors.append(self.embed.weight)
        for tensor in tensors:
            if tensor.device != device:
                tensor.data = tensor.data.to(device)

    # ---- loading -------------------------------------------------------------------------------------------------

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name of a tensor of a checkpoint → its shape, as far as this rank has it."""
        arch, layout = self.arch, self.arch.layout
        expected = {name: _side_by_side(views) for name, views in self._places().items()}
        if layout.embedding:
            expected[f"{layout.embedding}.weight"] = (arch.vocab_size, arch.arch.hidden_size)
        if layout.offsets:
            expected[layout.offsets] = (len(self.token_ids),)
        return expected

    def fill(self, tensors: dict[str, torch.Tensor], where: pathlib.Path, expected: dict[str, tuple[int, ...]]) -> None:
        """Take its part of the values of a checkpoint. expected: `shapes` of the whole head. Raises LoadError: missing,
        left-over or mis-shaped tensors."""
        arch, layout, names = self.arch, self.arch.layout, Names(self.arch.arch, in_gguf=False)
        found = {}
        for stored, tensor in tensors.items():
            name = stored.removeprefix(arch.prefix)
            inner = IN_LAYER + name.removeprefix(layout.layer)
            target, rows = (name, Rows()) if name in expected else names.parameter(inner)
            found[target if target in expected else name] = tensor, rows
        self._check(found, expected, where)
        for name, views in self._places().items():
            tensor, rows = found[name]
            if not rows.is_ours:
                tensor = tensor.reshape(expected[name]).clone()
                rearrange(tensor, rows)
            if name in self._regions:
                tensor = take(tensor, self._regions[name])
            start = 0
            for view in views:
                view.copy_(tensor if view.dim() == 1 else tensor[:, start : start + view.shape[1]])
                start += view.shape[-1]
        for norm in self.norms:
            if norm.weight is not None:
                norm.weight.add_(norm.table.spec.offset)
        for linear in self.linears:
            linear.finish()
        if f"{layout.embedding}.weight" in found:
            self.embed, self.has_embedding = self._embedding(found[f"{layout.embedding}.weight"][0]), True
        if layout.offsets in found:
            self.token_ids = self._map(found[layout.offsets][0], where)

    def _embedding(self, whole: torch.Tensor) -> Embedding:
        """Of a table of its own."""
        table_of = msgspec.structs.replace(self.arch.arch, vocab_size=len(whole))
        mine = share(embedding(table_of), self._comm.rank, self.n_ranks)
        table = take(whole, Region(mine.rows[0])).to(self._device, self.dtype)
        if self.n_ranks > 1:
            return DividedEmbedding(lambda *shape: table, mine, self._comm)
        return Embedding(lambda *shape: table, self.arch.layout.embedding, *table.shape)

    def _places(self) -> dict[str, list[torch.Tensor]]:
        """Name of a parameter → the views that have its columns, side by side."""
        found: dict[str, list[torch.Tensor]] = {}
        for linear in self.linears:
            for part, (name, _) in enumerate(linear.matrix.parts):
                for kind, view in linear.part(part).items():
                    found.setdefault(f"{name}.{kind}", []).append(view)
        for norm in self.norms:
            for part, name in enumerate(norm.table.parts):
                found |= {f"{name}.{kind}": [view] for kind, view in norm.part(part).items()}
        for own in self.layer.tables:
            found |= {f"{own.table.name}.{kind}": [view] for kind, view in own.part(0).items()}
        return found

    def _check(
        self,
        found: dict[str, tuple[torch.Tensor, Rows]],
        expected: dict[str, tuple[int, ...]],
        where: pathlib.Path,
    ) -> None:
        layout, what = self.arch.layout, f"the {self.arch.layout.what} {where}"
        optional = {f"{layout.embedding}.weight"}
        if len(self.token_ids) == self.arch.vocab_size:
            optional.add(layout.offsets)
        for said, names in (
            ("lacks", sorted(expected.keys() - found.keys() - optional)),
            ("has, which is not read,", sorted(found.keys() - expected.keys() - set(layout.not_read))),
        ):
            if names:
                listed = ", ".join(shown(self._stored(name)) for name in names[:8])
                raise LoadError(f"{what} {said} {listed}: give one in the layout that docs/heads.md describes")
        for name, (tensor, rows) in found.items():
            shape = stored_shape(expected[name], rows) if name in expected else tuple(tensor.shape)
            if tuple(tensor.shape) != shape:
                raise LoadError(
                    f"{what}: {self._stored(name)} has shape {tuple(tensor.shape)}; its config.json implies {shape}"
                )

    def _stored(self, name: str) -> str:
        """The checkpoint's name of a parameter."""
        layer = self.arch.layout.layer
        return self.arch.prefix + (layer + name.removeprefix(IN_LAYER) if name.startswith(IN_LAYER) else name)

    def _map(self, offsets: torch.Tensor, where: pathlib.Path) -> np.ndarray:
        ids = torch.arange(len(offsets)) + offsets.long()
        wrong = ((ids < 0) | (ids >= self.arch.vocab_size)).nonzero()
        if len(wrong):
            at = int(wrong[0])
            raise LoadError(
                f"{where}: {self.arch.layout.offsets} gives the head's token {at} the id {int(ids[at])}, and ids are "
                f"from 0 to {self.arch.vocab_size - 1}: give a head that was trained for this model"
            )
        return ids.numpy().astype(np.int32)


def _side_by_side(views: list[torch.Tensor]) -> tuple[int, ...]:
    """Their shape together."""
    return (len(views[0]), *([sum(view.shape[1] for view in views)] if views[0].dim() > 1 else []))


def load_head(folder: pathlib.Path, arch: HeadArch, model: Decoder, device: torch.device, comm: Comm) -> Head:
    """A head with the weights of `folder` for a model, or a rank's part of it. Raises LoadError, and as `Head`.

    A model that is rounded has a rounded head; one that a file's codes fill, a floating one.
    """
    scheme = _scheme_of(model.layers[0].linears[0].scheme, device, model.dtype)
    head, whole = _head_on(device, arch, model, scheme, comm), _head_on(NOWHERE, arch, model, scheme)
    left_out = tuple(arch.prefix + name for name in arch.layout.not_read)
    shards = open_checkpoint(folder)
    tensors = {name: one for shard in shards for name, one in _read(shard, arch.prefix, left_out)}
    head.fill(tensors, folder, whole.shapes())
    return head


def head_bytes(arch: HeadArch, model: Decoder, scheme: Scheme, device: torch.device, comm: Comm) -> int:
    """Of the head that `load_head` will make on a device for a model whose first matrix is kept so."""
    return _head_on(NOWHERE, arch, model, _scheme_of(scheme, device, model.dtype), comm).n_bytes


def _scheme_of(scheme: Scheme, device: torch.device, dtype: torch.dtype) -> MatrixScheme:
    return floating(device, dtype) if isinstance(scheme, FilledScheme) else scheme


def _head_on(
    device: torch.device, arch: HeadArch, model: Decoder, scheme: MatrixScheme, comm: Comm | None = None
) -> Head:
    return Head(arch, model, lambda *shape: torch.empty(shape, dtype=model.dtype, device=device), device, scheme, comm)


def _read(shard: Shard, prefix: str, left_out: tuple[str, ...]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a file whose names begin with `prefix`, but for those left out, on the CPU."""
    with open_shard(shard) as descriptor:
        for entry in shard.entries:
            if not entry.name.startswith(prefix) or entry.name in left_out:
                continue
            if entry.dtype not in DTYPES:
                raise LoadError(f"tensor {entry.name} has dtype {entry.dtype}; usable are {', '.join(DTYPES)}")
            buffer = bytearray(entry.n_bytes)
            read_into(descriptor, memoryview(buffer), entry.start, shard.path)
            tensor = torch.frombuffer(buffer, dtype=DTYPES[entry.dtype]).reshape(entry.shape)
            if tensor.is_floating_point() and not tensor.isfinite().all():
                raise LoadError(f"tensor {entry.name} of {shard.path} has values that are not finite")
            yield entry.name, tensor
