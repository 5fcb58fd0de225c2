"""Which parameter a tensor of a checkpoint is, and how its rows become ours.

Owns the use of a family's table of names, and the orders of rows. Does not own the tables (`config/families`), files
or copies. Invariant: a rearrangement is in place, on the parameter that the tensor was copied to as it is.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec
import torch

from quire.config.arch import ModelArch
from quire.config.experts import ExpertsSpec
from quire.config.families import GGUF_STACKS, STACKS, Order, Stored, family_named
from quire.config.mtp import mtp_prefix
from quire.config.parameters import LAYER

_NUMBER: Final = re.compile(r"(?<=\.)(0|[1-9]\d{0,5})(?=\.|$)")
_MIXER: Final = re.compile(r"^model\.layers\.(\d+)\.(?:self_attn|mixer)\.(\w+)\.")
_PLACE: Final = re.compile(r"^model\.layers\.(\d+)\.(.+)\.(\w+)$")
COMPUTED: Final = ("model.rotary_emb.inv_freq", "model.layers.{}.self_attn.rotary_emb.inv_freq")
"""Buffers that old checkpoints carry and every model computes from config.json."""


class Rows(msgspec.Struct, frozen=True):
    """How the rows of a tensor differ from the parameter's."""

    order: Order = Order.ROWS
    n_interleaved: int = 0
    """Heads in which rows alternate between the halves; 0: they do not."""
    rotary_dim: int = 0
    """Rows of each such head that do so; 0: all."""
    first_rotated: int = 0
    """The first of them in a head."""
    group: tuple[int, ...] = ()
    """`Order.GROUPED`: rows of each part in a group."""

    def of_part(self, n_rows: int, n_all: int) -> Rows:
        """Of n_rows rows, whole heads, of a tensor of n_all that has `Order.ROWS`."""
        return msgspec.structs.replace(self, n_interleaved=self.n_interleaved * n_rows // n_all)

    @property
    def is_ours(self) -> bool:
        """Whether nothing has to be moved."""
        return self.order is Order.ROWS and not self.n_interleaved


class Names:
    """The names of a checkpoint of `arch`, which may be a GGUF file under the names of parameters."""

    def __init__(self, arch: ModelArch, in_gguf: bool) -> None:
        family = family_named(arch.family)
        self.arch: Final = arch
        self._table = {} if in_gguf else family.names
        self._stacks = GGUF_STACKS if in_gguf else {**STACKS, **family.stacks}
        self._computed = frozenset((*COMPUTED, *family.computed))
        self._apart = (*family.unread, *(mtp_prefix(arch, number) for number in range(arch.n_mtp_modules)))
        self._in_halves = in_gguf and family.gguf is not None and family.gguf.interleaved

    def parameter(self, name: str) -> tuple[str, Rows]:
        """(name of the parameter, how its rows differ) for a tensor's name."""
        stem, _, kind = name.rpartition(".")
        template, number = _template(stem)
        found = self._table.get(template)
        if found is None and number is not None:
            template, row = _template(template)
            found = self._table.get(template) if row is not None else None
            found = found.format(row) if isinstance(found, str) else None
        stored = found if isinstance(found, Stored) else Stored(found or stem)
        if found is not None and number is not None:
            stored = Stored(LAYER.format(number) + stored.name, stored.order)
        target = f"{stored.name}.{kind}"
        return target, self._rows(target, stored.order)

    def in_checkpoint(self, parameter: str) -> str:
        """The name that a checkpoint has for a parameter, the inverse of `parameter`; its own if none is known."""
        inside = _PLACE.match(parameter)
        number, rest, kind = inside.groups() if inside else (None, *parameter.rpartition(".")[::2])
        for template, found in sorted(self._table.items(), key=lambda item: -len(item[0])):  # the fullest name
            name = found.name if isinstance(found, Stored) else found
            match = re.fullmatch(re.escape(name).replace(r"\{\}", r"(\d+)"), rest)
            numbers = ([] if number is None else [number]) + list(match.groups() if match else ())
            if match is not None and template.count("{}") == len(numbers):
                stored = f"{template.format(*numbers)}.{kind}"
                if self.parameter(stored)[0] == parameter:
                    return stored
        return parameter

    def of_experts(self, name: str) -> tuple[list[str], Rows] | None:
        """(name of each expert's parameter, how its rows differ) for the name of a tensor with one of each; None for
        another tensor."""
        template, number = _template(name)
        stored = self._stacks.get(template)
        if stored is None or number is None or number >= self.arch.n_layers:
            return None
        ffn = self.arch.layers[number].ffn
        n_experts = ffn.n_experts if isinstance(ffn, ExpertsSpec) else 0
        names = [LAYER.format(number) + stored.name.format(expert) for expert in range(n_experts)]
        return names, Rows(stored.order, n_interleaved=int(stored.alternates))

    def is_left_out(self, name: str) -> bool:
        """Whether the model makes this tensor itself, or it is one of an MTP module, which is no part of it."""
        return _template(name)[0] in self._computed or name.startswith(self._apart)

    def _rows(self, target: str, order: Order) -> Rows:
        inside = _MIXER.match(target)
        if inside is None or int(inside[1]) >= self.arch.n_layers:
            return Rows(order)
        mixer = self.arch.layers[int(inside[1])].mixer
        if mixer.rope is not None and (mixer.rope.interleaved or self._in_halves):
            rotated = mixer.rotated(inside[2])
            if rotated is not None:
                return Rows(order, rotated.n_heads, rotated.number, rotated.first)
        return Rows(order, group=mixer.grouped(inside[2]) if order is Order.GROUPED else ())


def _template(stem: str) -> tuple[str, int | None]:
    """The name with `{}` for its first number, and the number."""
    match = _NUMBER.search(stem)
    if match is None:
        return stem, None
    return f"{stem[: match.start()]}{{}}{stem[match.end() :]}", int(match[1])


def stored_shape(shape: tuple[int, ...], rows: Rows) -> tuple[int, ...]:
    """The shape that a checkpoint has for a parameter."""
    return tuple(reversed(shape)) if rows.order is Order.TRANSPOSED else shape


def rearrange(tensor: torch.Tensor, rows: Rows) -> None:
    """Bring what was copied as it is into the parameter's order. tensor: contiguous, of the parameter's shape."""
    if rows.order is Order.TRANSPOSED and tensor.dim() == 2:
        tensor.copy_(tensor.view(tensor.shape[1], tensor.shape[0]).t().contiguous())
    elif rows.order is Order.GROUPED:
        groups = tensor.view(-1, sum(rows.group), *tensor.shape[1:])
        tensor.copy_(torch.cat([part.flatten(0, 1) for part in groups.split(rows.group, dim=1)]))  # type: ignore[no-untyped-call]
    if rows.n_interleaved:
        separate_halves(tensor, rows.n_interleaved, rows.rotary_dim, rows.first_rotated)


def separate_halves(weight: torch.Tensor, n_heads: int, rotary_dim: int = 0, first: int = 0) -> None:
    """Undo the interleaving of rotary_dim (0: all) rows of each head from row `first` on, in place.

    weight: [n_heads * head_dim], [n_heads, head_dim] or [n_heads * head_dim, k], contiguous.
    """
    flat = weight.view(-1) if weight.shape[0] == n_heads else weight
    heads = flat.view(n_heads, -1, *flat.shape[1:])
    rotated = heads[:, first : first + (rotary_dim or heads.shape[1])]
    pairs = rotated.unflatten(1, (-1, 2))  # type: ignore[no-untyped-call]
    rotated.copy_(pairs.transpose(1, 2).flatten(1, 2).clone())
