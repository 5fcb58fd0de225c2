"""What one rank of a mesh has of a decoder, as lists of products, attention groups and states; and parameters by part.

Owns what is read off the description. Does not own a step's work (`operators`) nor time (`timing`). Generic over
mixers and feed-forwards: places whose name ends in a number (`up.7`) are experts, of which a token takes some.
"""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Sequence
from typing import Final

import msgspec

from quire.config.arch import ModelArch
from quire.config.layers import KVSpec, LayerSpec, MixerSpec
from quire.config.mesh import Mesh
from quire.config.parameters import Cut, LayerParameters, Matrix, layer_parameters
from quire.config.parameters import shapes as parameter_shapes
from quire.planner.expert_loads import ExpertLoads, spread
from quire.planner.formats import Formats
from quire.planner.launches import Launches, launches_apart
from quire.planner.mesh import n_experts_of, rank_layer
from quire.planner.shape import layer_kinds

NAMES = {"qkv": "qkv", "out": "o", "up": "gate_up", "down": "down", "in": "in", "a": "latent a", "q": "q", "q_b": "q b",
         "kv_b": "kv b", "router": "router", "shared_up": "shared gate_up", "shared_down": "shared down",
         "shared_gate": "shared gate"}  # fmt: skip
"""Place → operator, where it has another name for people."""
JOINED: Final = {"q", "a"}
"""Places of latent attention whose floating matrices are multiplied at once (`compute/layers/joined`)."""
EVEN_LOADS: Final = ExpertLoads()
EXPERTS: Final = "experts "
"""What the name of one of their matrices begins with."""


class Product(msgspec.Struct, frozen=True, kw_only=True):
    """Matrix products of one kind in one rank."""

    name: str
    n_times: int
    """Layers that have it."""
    n_in: int
    n_out: int
    n_bytes: float
    """Of one matrix."""
    products: str
    """Type of its arithmetic."""
    kept: str = "bfloat16"
    """Name of its format."""
    n_calls: int = 1
    """Kernels that it takes, each with a part of it; 0: it is a part of another product's."""
    n_of: int = 1
    """Matrices in a layer of this rank, of which each row takes some."""
    n_chosen: float = 1.0
    """Matrices that a row takes, of the `n_of_all` in the whole layer."""
    n_of_all: int = 1
    takes_turns: bool = False
    """Rows choose one matrix after the other, not at random."""
    chances: tuple[tuple[float, ...], ...] = ()
    """Of each rank, that a row takes its matrices: all wait for who reads most, and for who has most rows. Empty: all
    are as likely."""
    row_factor: float = 1.0
    """Rows that choose among its matrices, to those that this rank has: experts divided among replicas have the rows
    of all of these."""
    reduces: bool = False
    """Its result is a term that ranks sum."""
    is_late: bool = False
    """Behind attention: in the last layer only rows that want a token need it."""

    @property
    def is_experts(self) -> bool:
        """Whether rows choose among matrices."""
        return self.n_of_all > 1

    def read_bytes(self, n_rows: float) -> float:
        """Of the weights that so many rows need."""
        if not self.is_experts:
            return self.n_bytes
        n_choosing = n_rows * self.row_factor

        def unread(chance: float) -> float:
            return max(0.0, 1 - n_choosing * chance) if self.takes_turns else float((1 - chance) ** n_choosing)

        if self.chances:
            return self.n_bytes * max(sum(1 - unread(chance) for chance in rank) for rank in self.chances)
        return self.n_bytes * self.n_of * (1 - unread(self.n_chosen / self.n_of_all))

    def flops(self, n_rows: float) -> float:
        """Multiply and add counted as two."""
        return 2 * self.n_in * self.n_out * self.products_of_row * n_rows

    @property
    def products_of_row(self) -> float:
        """Of this rank for each row that it has, in the mean."""
        if not self.is_experts:
            return 1.0
        most = max(map(sum, self.chances), default=self.n_chosen * self.n_of / self.n_of_all)
        return self.row_factor * most


class AttentionGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Layers that attend alike."""

    n_times: int
    window: int
    token_numbers: int
    """Numbers that a token leaves in one layer of this rank; in the mean where ranks take tokens in turn."""
    pair_flops: int
    q_numbers: int
    """Of a row's queries, and of its result."""
    head_dim: int
    mixer: MixerSpec
    """Of the whole rank."""

    def flops(self, starts: Sequence[int], lengths: Sequence[int], n_pairs: float) -> float:
        """Of one layer; a span of several rows is computed the way that takes fewest."""
        n_flops = self.pair_flops * n_pairs
        if self.has_other_way:
            share = self.pair_flops / self.mixer.n_pair_flops
            spans = zip(starts, lengths, strict=True)
            n_flops -= share * sum(max(0, self.mixer.spared_flops(n, start + n)) for start, n in spans if n > 1)
        return n_flops

    def made_numbers(self, starts: Sequence[int], lengths: Sequence[int]) -> int:
        """Of keys, values and queries that are made of lines, in one layer, for spans that are computed so."""
        if not self.has_other_way:
            return 0
        spans = zip(starts, lengths, strict=True)
        n_lines = sum(start + n for start, n in spans if n > 1 and self.mixer.spared_flops(n, start + n) > 0)
        return n_lines * self.mixer.n_row_numbers

    @property
    def has_other_way(self) -> bool:
        """See `flops`: of lines, from which keys and values can be made."""
        kv = self.mixer.kv_spec
        return kv is not None and kv.value_in_key > 0


class StateGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Recurrent layers that are alike."""

    n_times: int
    n_bytes: int
    """Of one sequence and layer."""
    n_numbers: int


class RankParts(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of each stage, all stages together."""

    products: tuple[Product, ...]
    last: tuple[Product, ...]
    """Those of the last layer that are late."""
    head: Product
    attentions: tuple[AttentionGroup, ...]
    states: tuple[StateGroup, ...]
    n_norms: int
    """Over the width of the residual stream."""
    apart: Launches
    """Of rows, beside two norms and a rotation in each layer."""
    embedding_bytes: float
    other_bytes: float
    """Norms, biases and whatever else no product reads."""
    weights_bytes: float
    """All that this rank keeps, of all stages."""
    layers_bytes: float
    """Of these, without embedding and head."""
    hidden_size: int
    n_layers: int


@functools.lru_cache(maxsize=512)
def rank_parts(arch: ModelArch, mesh: Mesh, formats: Formats, loads: ExpertLoads = EVEN_LOADS) -> RankParts:
    """The first rank, or the one with most to do. ConfigError where the mesh cannot divide the model."""
    products: dict[Product, int] = collections.Counter()
    attentions: dict[AttentionGroup, int] = collections.Counter()
    states: dict[StateGroup, int] = collections.Counter()
    n_norms, other_numbers, apart = 1, float(arch.hidden_size), Launches()
    for spec, n_layers in layer_kinds(arch):
        own = rank_layer(spec, mesh.tp)
        for product in _layer_products(spec, own, arch.hidden_size, mesh, formats, loads):
            products[product] += n_layers
        kv, state = own.mixer.kv_spec, own.mixer.state_spec
        if kv is not None:
            attentions[_attention(own, kv.numbers, mesh)] += n_layers
        if state is not None:
            numbers = sum(math.prod(part.shape) for part in state.parts)
            states[StateGroup(n_times=1, n_bytes=state.n_bytes(formats.itemsize), n_numbers=numbers)] += n_layers
        parameters = _parameters(own, arch.hidden_size)
        n_norms += n_layers * sum(norm.shape == (arch.hidden_size,) for norm in parameters.norms)
        apart += launches_apart(own, parameters).times(n_layers)
        small = sum(math.prod(norm.shape) for norm in parameters.norms)
        small += sum(matrix.n_out for matrix in parameters.matrices if matrix.bias)
        small += sum(math.prod(one.shape) for one in parameters.mixer.tensors.values() if len(one.shape) != 2)
        other_numbers += n_layers * small
    replace = msgspec.structs.replace
    all_products = tuple(replace(one, n_times=n) for one, n in products.items())
    head = _head(arch, mesh, formats)
    embedding_bytes = -(-arch.vocab_size // mesh.tp) * arch.hidden_size * formats.itemsize
    position_bytes = arch.n_positions * arch.hidden_size * formats.itemsize
    other_bytes = other_numbers * formats.itemsize + position_bytes
    layers_bytes = sum(one.n_times * one.n_of * one.n_bytes for one in all_products) + other_bytes
    weights_bytes = layers_bytes + embedding_bytes
    if not arch.tie_embeddings or formats.head.is_rounded:
        weights_bytes += head.n_bytes
    return RankParts(
        products=all_products,
        last=tuple(
            one
            for one in _layer_products(
                arch.layers[-1], rank_layer(arch.layers[-1], mesh.tp), arch.hidden_size, mesh, formats, loads
            )
            if one.is_late
        ),
        head=head,
        attentions=tuple(replace(one, n_times=n) for one, n in attentions.items()),
        states=tuple(replace(one, n_times=n) for one, n in states.items()),
        n_norms=n_norms,
        apart=apart,
        embedding_bytes=embedding_bytes,
        other_bytes=other_bytes,
        weights_bytes=weights_bytes,
        layers_bytes=layers_bytes,
        hidden_size=arch.hidden_size,
        n_layers=arch.n_layers,
    )


def kv_share(kv: KVSpec, sp: int) -> float:
    """Of a token's numbers in a layer of a rank, what one of `sp` ranks has: whole heads, at least one. A latent line
    is one head."""
    return max(1, -(-kv.n_kv_heads // sp)) / kv.n_kv_heads


def _attention(own: LayerSpec, numbers: int, mesh: Mesh) -> AttentionGroup:
    mixer = own.mixer
    kv = mixer.kv_spec
    assert kv is not None
    return AttentionGroup(
        n_times=1, window=kv.window, token_numbers=round(numbers * kv_share(kv, mesh.sp) / mesh.ring),
        pair_flops=mixer.n_pair_flops // mesh.n_token_ranks, q_numbers=mixer.n_heads * kv.head_dim // mesh.sp,
        head_dim=kv.head_dim, mixer=mixer,
    )  # fmt: skip


def _head(arch: ModelArch, mesh: Mesh, formats: Formats) -> Product:
    n_out = -(-arch.vocab_size // mesh.tp)
    kept = formats.head
    return Product(
        name="head", n_times=1, n_in=arch.hidden_size, n_out=n_out, products=kept.products, kept=kept.name,
        n_bytes=kept.n_bytes(n_out, arch.hidden_size),
    )  # fmt: skip


class _Kinds(msgspec.Struct, frozen=True):
    """The matrices of a feed-forward, those of one kind together."""

    plain: dict[str, Matrix]
    experts: dict[str, Matrix]
    """Kind → the first one."""
    expert_numbers: int
    """Weights of all experts."""


@functools.lru_cache(maxsize=256)
def _kinds(spec: LayerSpec, hidden_size: int) -> _Kinds:
    plain: dict[str, Matrix] = {}
    experts: dict[str, Matrix] = {}
    numbers = 0
    for place, matrix in _parameters(spec, hidden_size).ffn.matrices.items():
        kind, _, number = place.partition(".")
        if number:
            experts.setdefault(kind, matrix)
            numbers += matrix.n_in * matrix.n_out
        else:
            plain[place] = matrix
    return _Kinds(plain, experts, numbers)


@functools.lru_cache(maxsize=256)
def _parameters(spec: LayerSpec, hidden_size: int) -> LayerParameters:
    return layer_parameters(spec, hidden_size, 0)


def _layer_products(
    spec: LayerSpec, own: LayerSpec, hidden_size: int, mesh: Mesh, formats: Formats, loads: ExpertLoads
) -> list[Product]:
    """Of one layer in one rank; own: what the rank has where experts are not divided whole."""
    mixer = _parameters(own, hidden_size).mixer
    found = [_product(place, matrix, formats) for place, matrix in mixer.matrices.items()]
    if JOINED.issubset(mixer.matrices) and not formats.weights.is_rounded:
        found = [msgspec.structs.replace(one, n_calls=0) if one.name == NAMES["a"] else one for one in found]
    for place, tensor in mixer.tensors.items():
        if len(tensor.shape) == 2:
            n_out, n_in = tensor.shape  # one part makes queries of lines, the other one values of their sums
            found.append(Product(
                name=NAMES.get(place, place), n_times=1, n_in=n_in, n_out=n_out,
                n_bytes=n_out * n_in * formats.itemsize, products="bfloat16", n_calls=2,
            ))  # fmt: skip
    replace = msgspec.structs.replace
    kinds = _kinds(own, hidden_size)
    found += [replace(_product(place, matrix, formats), is_late=True) for place, matrix in kinds.plain.items()]
    if not kinds.experts:
        return found
    n_all = n_experts_of(spec)
    used = 1 - own.ffn.n_idle_weights(hidden_size, 1) / kinds.expert_numbers
    takes_turns = own.ffn.n_idle_weights(hidden_size, math.ceil(1 / used)) == 0
    chances = () if loads.are_plain else spread(loads, n_all, used * n_all, mesh.ep).ranks
    whole = kinds.experts if mesh.ep == 1 else _kinds(spec, hidden_size).experts
    return found + [
        replace(
            _product(kind, matrix, formats), name=f"{EXPERTS}{NAMES.get(kind, kind)}", chances=chances,
            n_of=(n_all + loads.copies(mesh.ep)) // mesh.ep,
            n_of_all=n_all, n_chosen=used * n_all, is_late=True, takes_turns=takes_turns,
            row_factor=mesh.ep / mesh.tp if mesh.ep > 1 else 1.0,
        )
        for kind, matrix in whole.items()
    ]  # fmt: skip


def _product(place: str, matrix: Matrix, formats: Formats) -> Product:
    kept = formats.kept(matrix)
    return Product(
        name=NAMES.get(place, place), n_times=1, n_in=matrix.n_in, n_out=matrix.n_out, products=kept.products,
        kept=kept.name,
        n_bytes=kept.n_bytes(matrix.n_out, matrix.n_in), reduces=matrix.cut is Cut.ROW, is_late=place == "out",
    )  # fmt: skip


def parameters_by_part(arch: ModelArch) -> dict[str, int]:
    """Part → numbers stored. Their sum is `ModelArch.n_parameters`."""
    found: dict[str, int] = collections.Counter()
    for name, shape in parameter_shapes(msgspec.structs.replace(arch, layers=())):
        part = "head" if name.startswith("lm_head") else "norms" if "norm" in name else "embedding"
        found[part] += math.prod(shape)
    for spec, n_layers in layer_kinds(arch):
        parameters = _parameters(spec, arch.hidden_size)
        for place, matrix in (*parameters.mixer.matrices.items(), *parameters.ffn.matrices.items()):
            numbers = matrix.n_in * matrix.n_out + (matrix.n_out if matrix.bias else 0)
            found[_part_name(place)] += n_layers * numbers
        for norm in parameters.norms:
            n_tables = norm.spec.weight + norm.spec.bias
            found["norms"] += n_layers * n_tables * math.prod(norm.shape)
        for place, tensor in (*parameters.mixer.tensors.items(), *parameters.ffn.tensors.items()):
            found[NAMES.get(place, "other")] += n_layers * math.prod(tensor.shape)
    return dict(found)


def _part_name(place: str) -> str:
    kind, _, number = place.partition(".")
    return f"{EXPERTS}{NAMES.get(kind, kind)}" if number else NAMES.get(kind, kind)


def active_parameters(arch: ModelArch) -> int:
    """Those that one token goes through: all but the experts that it does not choose."""
    idle = sum(n * spec.ffn.n_idle_weights(arch.hidden_size, 1) for spec, n in layer_kinds(arch))
    return sum(parameters_by_part(arch).values()) - round(idle)
