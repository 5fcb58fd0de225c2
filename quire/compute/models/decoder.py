"""A decoder built from its description: embedding, layers, final norm and head over one flat batch of tokens.

Owns what stands around the layers, and all parameters by name. Does not own the data flow of a layer
(`layers/decoder_layer`), the KV cache (`Context`), where tensors live (`make`), nor loading. No family is named here.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import torch

from quire.compute.adapters.places import Adapters
from quire.compute.dist.added import RankSum
from quire.compute.dist.comm import Comm, SoloComm
from quire.compute.layers.context import Context
from quire.compute.layers.decoder_layer import DecoderLayer
from quire.compute.layers.experts import Experts, experts_of
from quire.compute.layers.float32_stream import Float32StreamLayer, Float32StreamNorm
from quire.compute.layers.linear import Embedding, Linear, Make, Table
from quire.compute.layers.norm import Norm
from quire.compute.layers.rotary import rotary_tables
from quire.compute.layers.vocabulary import DividedEmbedding, DividedHead
from quire.compute.models.rank_parts import RankParts
from quire.compute.schemes.choice import Schemes, schemes_on
from quire.config.arch import ModelArch
from quire.config.mesh import undivided
from quire.config.parameters import POSITIONS, final_norm
from quire.config.rope import Rope
from quire.config.shares import Region
from quire.config.stages import LayerRange
from quire.core.errors import EngineError
from quire.kernels import gemm, lora
from quire.kernels.kvstore.entry import Scales

Enter = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]
Part = Embedding | Linear | Norm | Table
"""A layer with parameters of its own: `part(index)` gives them."""


class Decoder:
    """One rank's part of a model, which is all of it where the rank is alone: nothing of the others is there then.

    A stage of a pipeline that is not the first has no embedding but for a tied head, one that is not the last neither
    norm nor head: these are not to be asked for.
    """

    embed: Embedding
    norm: Norm
    head: Linear

    def __init__(
        self,
        arch: ModelArch,
        make: Make,
        tables: Mapping[Rope | None, torch.Tensor],
        schemes: Schemes,
        comm: Comm | None = None,
        layers: LayerRange | None = None,
    ) -> None:
        """arch: the whole model. make(*shape): allocates a parameter. tables: see `rotary_tables`. comm: of the ranks
        that share each layer, None for the only one; layers: those of their stage, None: all. Raises ConfigError where
        the model cannot be divided."""
        comm = SoloComm() if comm is None else comm
        self.n_ranks = comm.size
        self.parts = parts = RankParts(arch, schemes, comm.rank, comm.size, layers)
        self.range = parts.range
        """Its layers among all."""
        self.arch = arch = parts.arch
        """What this rank computes; its vocabulary is that of the whole."""
        self.tables = dict(tables)
        self.device = next(iter(tables.values())).device
        """Where parameters are made."""
        self.dtype = make(0).dtype
        """Of parameters and products."""
        self.n_begun = 0
        """Layers that `forward` has come to: a sign that a long step goes on."""
        self.kv_scales: dict[int, Scales] = {}
        """Of a cache in e4m3, by layer, where a checkpoint brings other ones than 1."""
        self._embeddings: list[Embedding] = []
        if self.range.is_first or (self.range.is_last and arch.tie_embeddings):
            self.embed = self._embedding(make, comm)
            self._embeddings = [self.embed]
        self.enter: Enter = self.embed if self.range.is_first else no_entry
        """Token ids → the stream before the first layer, written to the second argument if given; a later stage is to
        be given one that has what the stage before it sends."""
        self.positions = Embedding(make, POSITIONS, arch.n_positions, arch.hidden_size) if arch.n_positions else None
        is_wide = self.stream_dtype != self.dtype
        make_layer = Float32StreamLayer if is_wide else DecoderLayer
        self.layers = [
            make_layer(spec, parts.layers[layer], layer, make, schemes, self.tables[spec.mixer.rope])
            for layer, spec in enumerate(arch.layers)
        ]
        self._ends: list[tuple[Norm, Linear]] = []
        """Norm and head, where they are here."""
        if self.range.is_last:
            self.norm = (Float32StreamNorm if is_wide else Norm)(make, final_norm(arch))
            tied = self.embed.weight if arch.tie_embeddings else None
            self.head = Linear(make, parts.head.matrix, schemes.of(parts.head.matrix), tied=tied)
            self._ends = [(self.norm, self.head)]
            self._project: Linear | DividedHead = self.head
            if comm.size > 1:
                self._project = DividedHead(self.head, arch.vocab_size, comm)
        self.adapters: Adapters | None = None
        """What is added to its products for some rows; to be set before there is a forward strategy."""
        if comm.size > 1:
            ranks = RankSum(comm)
            for layer in self.layers:
                layer.sum_over(ranks)

    def _embedding(self, make: Make, comm: Comm) -> Embedding:
        share = self.parts.embedding
        if comm.size > 1:
            return DividedEmbedding(make, share, comm)
        return Embedding(make, share.matrix.name, share.matrix.n_out, share.matrix.n_in)

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        context: Context,
        wanted: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        visit: Callable[[int, torch.Tensor], None] | None = None,
        visits_last: bool = False,
    ) -> torch.Tensor:
        """token_ids, positions: [n] int32 or int64, over all spans of a step → states for `logits` [n, hidden].

        wanted: int64 [m], rows whose state is needed, None for all; the result is then [m, hidden], and the last
        layer's feed-forward runs for those rows only. out: memory of the residual stream [n, hidden], which is the
        result if all rows are wanted. visit: told the number of each layer and the stream that it is about to read.
        visits_last: and what the last one leaves, of all rows.
        """
        x = self.enter(token_ids, out) if self.stream_dtype == self.dtype else self._widened(token_ids, out)
        if self.arch.embedding_scale != 1.0:
            x.mul_(self.arch.embedding_scale)
        if self.positions is not None:
            x.add_(self.positions(positions + self.arch.first_position))
        n_layers = len(self.layers)
        for index, layer in enumerate(self.layers):
            if visit is not None:
                visit(index, x)
            self.n_begun += 1
            x = layer(x, positions, context, wanted if index == n_layers - 1 and not visits_last else None)
        if visit is not None and visits_last:
            visit(n_layers, x)
            return x if wanted is None else x[wanted]
        return x

    def _widened(self, token_ids: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        """Embeddings in the type of the stream."""
        x = self.enter(token_ids, None)
        return x.to(self.stream_dtype) if out is None else out.copy_(x)

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """hidden: [m, hidden], rows of what `forward` returned → [m, vocab_size] float32, or `out`, which takes them in
        float32 or the model's dtype: the values are the same, as they are computed in the latter, as in transformers.
        """
        if out is None:
            out = torch.empty(len(hidden), self.arch.vocab_size, dtype=torch.float32, device=hidden.device)
        pair = self.norm.pair
        if pair is None:
            logits = self._project(self.norm(hidden), out=out)
        else:
            logits = self._project(hidden, norm=pair, out=out)
        if self.arch.logits_scale != 1.0:
            logits.mul_(self.arch.logits_scale)
        if self.arch.logits_soft_cap:
            logits.div_(self.arch.logits_soft_cap).tanh_().mul_(self.arch.logits_soft_cap)
        return logits

    def build_kernels(self, max_rows: int) -> None:
        """Compile what the products of steps with up to max_rows rows need, so that no step has to wait for it."""
        kernels = self.kernels()
        shapes = {shape for linear in self.linears() for shape in linear.plain_shapes}
        forms = {form for linear in self.linears() for form in linear.coded_shapes}
        plain = [one for one in kernels if (one.n, one.k) in shapes]
        coded = [(one, ahead) for one in kernels for shape, ahead in forms if shape == (one.n, one.k)]
        rank = 0 if self.adapters is None else self.adapters.rank
        gemm.build(plain, self.dtype, self.device, max_rows, rank, lora.variant_of, coded)
        for layer in {layer.spec.ffn: layer for layer in self.layers}.values():
            layer.ffn.build(max_rows)

    def kernels(self) -> list[gemm.LinearShape]:
        """Its products as they are called, each once."""
        layers = {kernel: None for layer in self.layers for kernel in layer.kernels()}
        if self.adapters is not None:  # which add to what is gated then
            layers |= {dataclasses.replace(kernel, silu_mul=False): None for kernel in layers if kernel.silu_mul}
        for norm, head in self._ends:
            layers |= {head.kernel(norm=norm.pair is not None, wide=wide): None for wide in (False, True)}
        return list(layers)

    def states(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [m, hidden], rows of what `forward` returned → the same after the final norm, float32."""
        return self.norm(hidden).float()

    @property
    def stream_dtype(self) -> torch.dtype:
        """Of the residual stream, and so of states."""
        return torch.float32 if self.arch.float32_stream else self.dtype

    @property
    def is_plain(self) -> bool:
        """Whether a step is embedding, plain layers (`DecoderLayer.is_plain`), RMS norm and head, and nothing else."""
        arch = self.arch
        scaled = arch.embedding_scale != 1.0 or arch.logits_scale != 1.0 or arch.logits_soft_cap or arch.n_positions
        return all(layer.is_plain for layer in self.layers) and not scaled and self.norm.pair is not None

    @property
    def is_whole(self) -> bool:
        """Whether it has every layer."""
        return self.range.is_first and self.range.is_last

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name as in `config.parameters`, contiguous view of the parameter), before anything is finished; without the
        matrices that a file's blocks are."""
        for name, layer, part in self._places():
            for kind, tensor in layer.part(part).items():
                yield f"{name}.{kind}", tensor

    def wholes(self) -> dict[str, tuple[torch.Tensor, list[str]]]:
        """Name that a checkpoint may have for several parameters as one → (view of all, their names)."""
        found = {}
        for linear in self.linears():
            if linear.matrix.whole:
                for kind, tensor in linear.parameters().items():
                    names = [f"{name}.{kind}" for name, _ in linear.matrix.parts]
                    found[f"{linear.matrix.whole}.{kind}"] = tensor, names
        return found

    def regions(self) -> dict[str, Region]:
        """Name as in `weights` or `wholes` → which part of the whole model's this rank has; not those that are all."""
        return self.parts.regions()

    def owners(self) -> dict[str, Linear]:
        """Name as in `weights` → the layer that can be finished once all its names have their values."""
        layers = [(name, layer, part) for name, layer, part in self._places() if isinstance(layer, Linear)]
        return {f"{name}.{kind}": layer for name, layer, part in layers for kind in layer.part(part)}

    def offsets(self) -> dict[str, float]:
        """Name as in `weights` → what its stored values lack."""
        tables = [norm.table for norm in self.norms() if norm.table.spec.offset]
        return {f"{name}.weight": table.spec.offset for table in tables for name in table.parts}

    def expert_loads(self) -> list[list[int]]:
        """Of each layer with experts, how many tokens chose each of them since it was made; waits for the device."""
        return [experts.load.tolist() for experts in experts_of(self.layers)]

    def expert_layers(self) -> list[int]:
        """Numbers in the model, from 0, of the layers that `expert_loads` tells of."""
        return [self.range.first + at for at, layer in enumerate(self.layers) if isinstance(layer.ffn, Experts)]

    def _places(self) -> Iterator[tuple[str, Part, int]]:
        """(name without kind, layer, index of the layer's part)."""
        for table in self._tables_of_ids():
            yield table.name, table, 0
        for layer in self.layers:
            for linear in layer.linears:
                for part, (name, _) in enumerate(linear.matrix.parts):
                    yield name, linear, part
            for norm in layer.norms:
                for part, name in enumerate(norm.table.parts):
                    yield name, norm, part
            for own in layer.tables:
                yield own.table.name, own, 0
        for norm, head in self._ends:
            yield norm.table.name, norm, 0
            if not self.arch.tie_embeddings:
                yield head.matrix.parts[0][0], head, 0

    def _tables_of_ids(self) -> list[Embedding]:
        return self._embeddings + ([] if self.positions is None else [self.positions])

    def linears(self) -> Iterator[Linear]:
        """All layers that have a matrix."""
        for layer in self.layers:
            yield from layer.linears
        yield from (head for _, head in self._ends)

    def adapted(self, places: np.ndarray | None) -> contextlib.AbstractContextManager[None]:
        """Forwards inside are of rows with adapters in these places, int [n], -1: none; None: of rows without."""
        if self.adapters is None or places is None:
            return contextlib.nullcontext()
        return self.adapters.active(self.adapters.rows(places), len(places))

    def adaptable(self) -> Iterator[Linear]:
        """Those that adapters may add to, in the order of computing."""
        for layer in self.layers:
            yield from (*layer.mixer.linears, *layer.ffn.adaptable)

    def adaptable_of_all(self) -> Iterator[Linear]:
        """Those of every stage; of other stages nowhere in memory, and undivided."""
        every = self if self.is_whole else decoder_on(torch.device("meta"), self.parts.whole, self.dtype, 1)
        return every.adaptable()

    def norms(self) -> Iterator[Norm]:
        """All of them."""
        for layer in self.layers:
            yield from layer.norms
        yield from (norm for norm, _ in self._ends)

    def _tables(self) -> list[torch.Tensor]:
        """Parameters that no matrix product takes."""
        embeddings = [table.weight for table in self._tables_of_ids()]
        own = [table.values for layer in self.layers for table in layer.tables]
        return embeddings + [tensor for norm in self.norms() for tensor in norm.tensors] + own

    @property
    def n_bytes(self) -> int:
        """Memory of all parameters when they are finished, as their schemes declare it."""
        return sum(table.nbytes for table in self._tables()) + sum(linear.n_bytes for linear in self.linears())

    def leave_device(self) -> None:
        """Move every parameter into the host's memory. What was made for their addresses is void afterwards."""
        self._move(torch.device("cpu"))
        if self.adapters is not None:
            self.adapters.leave_device()

    def enter_device(self) -> None:
        """Move every parameter to where it was made."""
        self._move(self.device)
        if self.adapters is not None:
            self.adapters.enter_device()

    def _move(self, device: torch.device) -> None:
        """Tensors stay the same objects, so that a tied head stays tied. A packed product is on the CPU already."""
        tensors = [*self.tables.values(), *self._tables(), *(one for _, head in self._ends for one in head.tensors())]
        for layer in self.layers:
            tensors += layer.tensors()
        for tensor in {id(tensor): tensor for tensor in tensors}.values():
            if tensor.device != device:
                tensor.data = tensor.data.to(device)

    def finish(self) -> None:
        """Make of the matrices what their schemes store, when all weights are in place."""
        for linear in self.linears():
            linear.finish()


def decoder_on(
    device: torch.device,
    arch: ModelArch,
    dtype: torch.dtype,
    max_model_len: int,
    schemes: Schemes | None = None,
    comm: Comm | None = None,
    layers: LayerRange | None = None,
) -> Decoder:
    """A decoder whose parameters are allocated on `device` ('meta': nowhere) and not filled.

    schemes: of its matrices; None: those of the device for `dtype`, without rounding. comm, layers: as `Decoder`, but
    without a comm it has all experts, whoever is to have them.
    """
    arch = undivided(arch) if comm is None else arch

    def make(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    tables = {rope: table.to(device) for rope, table in rotary_tables(arch, max_model_len).items()}
    return Decoder(arch, make, tables, schemes_on(device, dtype) if schemes is None else schemes, comm, layers)


def no_entry(token_ids: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    """`Decoder.enter` of a later stage that was given none."""
    raise EngineError("a later stage was to be computed before it was given what the stage before it sends")
