"""Latent attention of one layer: every head reads the line that a token leaves, which keys and values are made of.

Owns the parameters and the two products around attention. Does not own pages (`Context`).
With the keys' matrix multiplied into queries, and the values' into results, lines are keys, and their first part is
values (DeepSeek-V2, arXiv 2405.04434, section 2.1.2): exact for prompts, decoding and drafts alike.
"""

from __future__ import annotations

import torch

from quire.compute.layers.context import Context
from quire.compute.layers.linear import Linear, Make, Table
from quire.compute.layers.norm import Norm, project
from quire.compute.schemes.choice import Schemes
from quire.config.latent import LatentAttentionSpec
from quire.config.parameters import MixerParameters
from quire.kernels import gemm
from quire.kernels.attention.variant import Variant


class LatentAttention:
    """A `Mixer`. `cos_sin`: the rotary table of the layer, see `layers.rotary`."""

    is_plain = False

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
        made = {place: Linear(make, matrix, schemes.of(matrix)) for place, matrix in parameters.matrices.items()}
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
        first = project(self.first, x, norm)
        if self.q_norm is None:
            q = project(self.queries, x, norm)
        else:
            q = self.queries(self.q_norm(first[:, : spec.q_lora_rank]))
        q_plain, q_rope = q.view(n, spec.n_heads, -1).split((spec.qk_nope_head_dim, spec.qk_rope_head_dim), dim=2)  # type: ignore[no-untyped-call]
        of_keys, of_values = self._matrices()
        asked = q.new_empty(n, spec.n_heads, spec.line_dim)
        torch.bmm(q_plain.transpose(0, 1), of_keys, out=asked[:, :, : spec.kv_lora_rank].transpose(0, 1))
        assert self.kv_norm.weight is not None and self.variant is not None
        context.store_lines(
            self.layer, first[:, spec.q_lora_rank :], self.kv_norm.weight, self.kv_norm.eps, q_rope,
            asked[:, :, spec.kv_lora_rank :], positions, self.cos_sin,
        )  # fmt: skip
        seen = context.attend(self.layer, asked, self.variant)
        y = q.new_empty(n, spec.n_heads, spec.v_head_dim)
        torch.bmm(seen.transpose(0, 1), of_values, out=y.transpose(0, 1))
        return y.flatten(1)

    def _matrices(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What makes a query of a line's first part of one without a position [n_heads, nope, rank], and a result of
        what is seen of lines [n_heads, rank, v]."""
        spec = self.spec
        made = self.made.values.view(spec.n_heads, -1, spec.kv_lora_rank)
        return made[:, : spec.qk_nope_head_dim], made[:, spec.qk_nope_head_dim :].transpose(1, 2)

    def kernels(self, *, norm: bool) -> list[gemm.LinearShape]:
        """See `Mixer`."""
        return [self.first.kernel(norm=norm), self.queries.kernel(norm=norm and self.q_norm is None)]
