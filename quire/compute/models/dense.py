"""Dense decoders (Llama, Mistral, Qwen2, Qwen3): attention and SwiGLU with pre-norm over one flat batch of tokens.

Owns the data flow and the table of weight names; does not own the KV cache (`Context`), where tensors live (`make`),
nor loading. Features come from `ModelArch`; no family is named here.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch

from quire.compute.layers.context import Context
from quire.compute.layers.linear import Embedding, Head, Linear, Make
from quire.compute.layers.norm import RMSNorm
from quire.config.arch import ModelArch
from quire.kernels.act import silu_mul
from quire.kernels.attention import Variant

BLOCK_NAMES = (
    # name in the checkpoint after "model.layers.{i}.", attribute of Block, part of a fused layer
    ("input_layernorm", "attention_norm", 0),
    ("self_attn.q_proj", "attention.qkv", 0),
    ("self_attn.k_proj", "attention.qkv", 1),
    ("self_attn.v_proj", "attention.qkv", 2),
    ("self_attn.o_proj", "attention.out", 0),
    ("self_attn.q_norm", "attention.q_norm", 0),
    ("self_attn.k_norm", "attention.k_norm", 0),
    ("post_attention_layernorm", "ffn_norm", 0),
    ("mlp.gate_proj", "gate_up", 0),
    ("mlp.up_proj", "gate_up", 1),
    ("mlp.down_proj", "down", 0),
)
MODEL_NAMES = (("model.embed_tokens", "embed", 0), ("model.norm", "norm", 0))
HEAD_NAMES = (("lm_head", "head", 0),)


class Attention:
    """Grouped-query attention with rotary positions."""

    def __init__(self, arch: ModelArch, layer: int, make: Make) -> None:
        self.layer = layer
        self.eps = arch.rms_eps
        self.variant = Variant(arch.attention_scale, window=arch.windows[layer])
        self.qkv = Linear(make, arch.hidden_size, (arch.q_size, arch.kv_size, arch.kv_size), bias=arch.qkv_bias)
        self.out = Linear(make, arch.q_size, (arch.hidden_size,), bias=arch.o_bias)
        self.q_norm = RMSNorm(make, arch.head_dim, arch.rms_eps) if arch.qk_norm else None
        self.k_norm = RMSNorm(make, arch.head_dim, arch.rms_eps) if arch.qk_norm else None

    def __call__(
        self, x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, context: Context
    ) -> torch.Tensor:
        """x: [n, hidden] → [n, hidden]."""
        q_norm, k_norm = (None if norm is None else norm.weight for norm in (self.q_norm, self.k_norm))
        q = context.store(self.layer, self.qkv(x), q_norm, k_norm, self.eps, positions, cos_sin)
        return self.out(context.attend(self.layer, q, self.variant).flatten(1))


class Block:
    """Attention, then feed-forward, each after a norm and added to the residual stream."""

    def __init__(self, arch: ModelArch, layer: int, make: Make) -> None:
        self.attention_norm = RMSNorm(make, arch.hidden_size, arch.rms_eps)
        self.attention = Attention(arch, layer, make)
        self.ffn_norm = RMSNorm(make, arch.hidden_size, arch.rms_eps)
        self.gate_up = Linear(make, arch.hidden_size, (arch.ffn_size, arch.ffn_size), bias=arch.mlp_bias)
        self.down = Linear(make, arch.ffn_size, (arch.hidden_size,), bias=arch.mlp_bias)

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
        context: Context,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x: normed input, residual: the stream, both [n, hidden] → (what is still to be added, the stream)."""
        x = self.attention(x, positions, cos_sin, context)
        x, residual = self.ffn_norm.add(x, residual)
        return self.down(silu_mul(self.gate_up(x))), residual


class DenseModel:
    """The whole decoder. `make(*shape)` allocates a parameter; `cos_sin` is the table of `layers.rotary.rope_table`."""

    def __init__(self, arch: ModelArch, make: Make, cos_sin: torch.Tensor) -> None:
        self.arch = arch
        self.cos_sin = cos_sin
        self.embed = Embedding(make, arch.vocab_size, arch.hidden_size)
        self.blocks = [Block(arch, layer, make) for layer in range(arch.n_layers)]
        self.norm = RMSNorm(make, arch.hidden_size, arch.rms_eps)
        tied = self.embed.weight if arch.tie_embeddings else None
        self.head = Head(make, arch.hidden_size, (arch.vocab_size,), tied=tied)

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, context: Context) -> torch.Tensor:
        """token_ids, positions: [n] int32 or int64, over all spans of a step → final normed states [n, hidden]."""
        residual = self.embed(token_ids)
        x = self.blocks[0].attention_norm(residual)
        following = [block.attention_norm for block in self.blocks[1:]] + [self.norm]
        for block, norm in zip(self.blocks, following, strict=True):
            x, residual = block(x, residual, positions, self.cos_sin, context)
            x, residual = norm.add(x, residual)
        return x

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """hidden: [m, hidden], rows of what `forward` returned → [m, vocab_size] float32, written to `out` if given."""
        return self.head(hidden, out)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name in a checkpoint, contiguous view of the parameter that takes it), until `pack` is called."""
        for name, place, part in MODEL_NAMES if self.arch.tie_embeddings else MODEL_NAMES + HEAD_NAMES:
            yield from _named(name, self, place, part)
        for layer, block in enumerate(self.blocks):
            for name, place, part in BLOCK_NAMES:
                yield from _named(f"model.layers.{layer}.{name}", block, place, part)

    def pack(self) -> None:
        """Bring the matrices into the layout of the machine's products. Call once, when all weights are in place."""
        self.head.pack()
        for block in self.blocks:
            for layer in (block.attention.qkv, block.attention.out, block.gate_up, block.down):
                layer.pack()


def _named(name: str, owner: object, place: str, part: int) -> Iterator[tuple[str, torch.Tensor]]:
    layer = operator.attrgetter(place)(owner)
    if layer is not None:
        for kind, tensor in layer.part(part).items():
            yield f"{name}.{kind}", tensor
