"""Latent attention of one layer: every head reads the line that a token leaves, which keys and values are made of.

Owns the parameters and the two products around attention. Does not own pages (`Context`).
With the keys' matrix multiplied into queries, and the values' into results, lines are keys, and their first part is
values (DeepSeek-V2, arXiv 2405.04434, section 2.1.2): exact for prompts, decoding and drafts alike. For spans of
many rows keys and values are made of lines instead: less arithmetic.
"""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F

from quire.compute.dist.added import RankSum
from quire.compute.layers.context import Context, Expanded
from quire.compute.layers.joined import joined
from quire.compute.layers.linear import Linear, Make, Table
from quire.compute.layers.norm import Norm, project
from quire.compute.schemes.choice import Schemes
from quire.config.latent import LatentAttentionSpec
from quire.config.parameters import MixerParameters
from quire.kernels import gemm
from quire.kernels.attention.variant import Variant

JOINED: Final = ("q", "a")
"""Places of the matrices that both read the stream where queries have no rank; else "a" has the rows of both."""


class LatentAttention:
    """A `Mixer`. `cos_sin`: the rotary table of the layer, see `layers.rotary`."""

    is_plain = False
    ranks: RankSum | None = None

    def __init__(
        self,
        spec: LatentAttentionSpec,
        parameters: MixerParameters,
        layer: int,
        make: Make,
        schemes: Schemes,
        cos_sin: torch.Tensor,
    ) -> None:
        self.spec, self.layer, self.cos_sin = spec, layer, cos_sin
        self.variant: Variant | None = Variant(spec.scale)
        self.joined = None if spec.q_lora_rank else joined(make, [parameters.matrices[one] for one in JOINED], schemes)
        """Queries and lines of the stream as one product, where both are floating and no adapter adds to them."""
        made = {
            place: Linear(make, matrix, schemes.of(matrix))
            for place, matrix in parameters.matrices.items()
            if self.joined is None or place not in JOINED
        }
        if self.joined is not None:
            made = dict(zip(JOINED, self.joined.linears, strict=True)) | made
        self.linears = tuple(made.values())
        """See `Mixer`."""
        self.first, self.out = made["a"], made["out"]
        self.queries = made["q_b" if spec.q_lora_rank else "q"]
        normed = {place: Norm(make, table) for place, table in parameters.norms.items()}
        self.norms = tuple(normed.values())
        """See `Mixer`."""
        self.q_norm, self.kv_norm = normed.get("q"), normed["kv"]
        self.made = Table(make, parameters.tensors["kv_b"])
        """Of each head the rows that make a key, then those that make a value, [n_heads * (nope + v), rank]."""
        self.tables = (self.made,)
        """See `Mixer`."""

    def __call__(self, x: torch.Tensor, norm: Norm | None, positions: torch.Tensor, context: Context) -> torch.Tensor:
        """See `Mixer`."""
        spec, n = self.spec, len(x)
        q, first = self._projected(x, norm)
        q = q.view(n, spec.n_heads, -1)
        if context.expanded is not None:
            return self._apart(first, q, positions, context, context.expanded)
        keys, _ = self._matrices()
        asked = context.ask_lines(self.layer, *self._lines(first), q, keys, positions, self.cos_sin)
        return self._seen(asked, context)

    def _projected(self, x: torch.Tensor, norm: Norm | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries [n, n_heads * d], and what else is made of the stream: numbers of queries, and lines."""
        if self.joined is not None and self.joined.are_bare:
            pair = None if norm is None else norm.pair
            q, first = self.joined(x if norm is None or pair is not None else norm(x), pair)
            return q, first
        first = project(self.first, x, norm)
        if self.q_norm is None:
            return project(self.queries, x, norm), first
        return self.queries(self.q_norm(first[:, : self.spec.q_lora_rank])), first

    def _lines(self, first: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, float]:
        """Of all rows, as the product left them, and what norms them."""
        assert self.kv_norm.weight is not None
        return first[:, self.spec.q_lora_rank :], self.kv_norm.weight, self.kv_norm.eps

    def _asked(self, q: torch.Tensor) -> torch.Tensor:
        """What queries ask of lines, without the part that is rotated: for those whose part is rotated already."""
        spec = self.spec
        asked = q.new_empty(len(q), spec.n_heads, spec.line_dim)
        plain = q[:, :, : spec.qk_nope_head_dim].transpose(0, 1)
        torch.bmm(plain, self._matrices()[0], out=asked[:, :, : spec.kv_lora_rank].transpose(0, 1))
        return asked

    def _seen(self, asked: torch.Tensor, context: Context) -> torch.Tensor:
        """Attention to lines, and its results in the dimensions of values [n, n_heads * v]."""
        assert self.variant is not None
        return context.attend_lines(self.layer, asked, self.variant, self._matrices()[1]).flatten(1)

    def _apart(
        self, first: torch.Tensor, q: torch.Tensor, positions: torch.Tensor, context: Context, apart: Expanded
    ) -> torch.Tensor:
        """The rows for which keys and values are made, and the others."""
        spec, rows, others = self.spec, apart.rows, apart.others
        turned = q[:, :, spec.qk_nope_head_dim :]
        context.store_lines(self.layer, *self._lines(first), turned, turned, positions, self.cos_sin)
        y = q.new_empty(len(q), spec.n_heads, spec.v_head_dim)
        if apart.n_rows < len(q):
            asked = self._asked(q[others])
            asked[:, :, spec.kv_lora_rank :] = turned[others]
            y[others] = self._seen(asked, context).view(-1, *y.shape[1:])
        if isinstance(rows, slice):
            self._expanded(q[rows], context, apart, y[rows])
        else:
            made = y.new_empty(apart.n_rows, *y.shape[1:])
            self._expanded(q[rows], context, apart, made)
            y[rows] = made
        return y.flatten(1)

    def _expanded(self, q: torch.Tensor, context: Context, apart: Expanded, y: torch.Tensor) -> None:
        """y [n, n_heads, v] of these rows, rotated. Values are filled up to the size of keys, or keys and queries to
        that of values."""
        spec = self.spec
        size = max(spec.qk_head_dim, spec.v_head_dim)
        asked = q if size == spec.qk_head_dim else F.pad(q, (0, size - spec.qk_head_dim))
        assert self.variant is not None
        for heads in apart.heads(spec.n_heads):
            k, v = self._keys_and_values(heads, size, context, apart)
            y[:, heads] = apart.attend(asked[:, heads], k, v, self.variant)[:, :, : spec.v_head_dim]

    def _keys_and_values(
        self, heads: slice, size: int, context: Context, apart: Expanded
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Of these heads [n_lines, n_heads, size], behind their numbers zeros."""
        spec = self.spec
        rank, nope, d = spec.kv_lora_rank, spec.qk_nope_head_dim, spec.qk_head_dim
        weight = self.made.values.view(spec.n_heads, -1, rank)[heads]
        of_keys, of_values = weight[:, :nope].transpose(1, 2), weight[:, nope:].transpose(1, 2)
        k, v = (_filled_up(weight, apart.n_lines, len(weight), n, size) for n in (d, spec.v_head_dim))
        for piece in apart.pieces():
            lines = context.lines(self.layer, piece)
            latent = lines[:, :rank].expand(len(weight), -1, -1)
            torch.bmm(latent, of_keys, out=k[piece, :, :nope].transpose(0, 1))
            torch.bmm(latent, of_values, out=v[piece, :, : spec.v_head_dim].transpose(0, 1))
            k[piece, :, nope:d] = lines[:, None, rank:]
        return k, v

    def _matrices(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What makes a query of a line's first part of one without a position [n_heads, nope, rank], and a result of
        what is seen of lines [n_heads, v, rank]."""
        spec = self.spec
        made = self.made.values.view(spec.n_heads, -1, spec.kv_lora_rank)
        return made[:, : spec.qk_nope_head_dim], made[:, spec.qk_nope_head_dim :]

    def kernels(self, *, norm: bool) -> list[gemm.LinearShape]:
        """See `Mixer`."""
        alone = [self.first.kernel(norm=norm), self.queries.kernel(norm=norm and self.q_norm is None)]
        return alone if self.joined is None else [self.joined.kernel(norm=norm), *alone]


def _filled_up(like: torch.Tensor, n: int, n_heads: int, filled: int, size: int) -> torch.Tensor:
    """Room for [n, n_heads, filled] numbers, each with zeros behind it up to size."""
    made = like.new_empty(n, n_heads, size)
    made[:, :, filled:] = 0
    return made
