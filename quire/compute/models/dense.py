"""Dense decoders (Llama, Mistral, Qwen2, Qwen3): attention and SwiGLU with pre-norm over one flat batch of tokens.

Owns the data flow and the table of weight names; does not own the KV cache (`Context`), where tensors live (`make`),
nor loading. Features come from `ModelArch`; no family is named here.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch

from quire.compute.layers.context import Context
from quire.compute.layers.linear import Embedding, Linear, Make
from quire.compute.layers.norm import RMSNorm
from quire.compute.quant import Quantize, Rounded
from quire.config.arch import ModelArch
from quire.kernels import gemm
from quire.kernels.attention import Variant
from quire.kernels.gemm import Norm
from quire.kernels.norm import rms_norm

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
Part = Embedding | Linear | RMSNorm
"""A layer with parameters of its own: `part(index)` gives them."""


class Attention:
    """Grouped-query attention with rotary positions."""

    def __init__(self, arch: ModelArch, layer: int, make: Make, quantize: Quantize | None) -> None:
        self.layer = layer
        self.eps = arch.rms_eps
        self.variant = Variant(arch.attention_scale, window=arch.windows[layer])
        sizes = (arch.q_size, arch.kv_size, arch.kv_size)
        self.qkv = Linear(make, arch.hidden_size, sizes, bias=arch.qkv_bias, quantize=quantize)
        self.out = Linear(make, arch.q_size, (arch.hidden_size,), bias=arch.o_bias, quantize=quantize)
        self.q_norm = RMSNorm(make, arch.head_dim, arch.rms_eps) if arch.qk_norm else None
        self.k_norm = RMSNorm(make, arch.head_dim, arch.rms_eps) if arch.qk_norm else None

    def __call__(
        self, x: torch.Tensor, norm: Norm, positions: torch.Tensor, cos_sin: torch.Tensor, context: Context
    ) -> torch.Tensor:
        """x: [n, hidden], norm: what to apply to it first → [n, q_size], to be given to `out`."""
        q_norm, k_norm = (None if norm is None else norm.weight for norm in (self.q_norm, self.k_norm))
        q = context.store(self.layer, self.qkv(x, norm=norm), q_norm, k_norm, self.eps, positions, cos_sin)
        return context.attend(self.layer, q, self.variant).flatten(1)


class Block:
    """Attention, then feed-forward, each after a norm and added to the residual stream."""

    def __init__(self, arch: ModelArch, layer: int, make: Make, quantize: Quantize | None) -> None:
        self.attention_norm = RMSNorm(make, arch.hidden_size, arch.rms_eps)
        self.attention = Attention(arch, layer, make, quantize)
        self.ffn_norm = RMSNorm(make, arch.hidden_size, arch.rms_eps)
        sizes = (arch.ffn_size, arch.ffn_size)
        self.gate_up = Linear(make, arch.hidden_size, sizes, bias=arch.mlp_bias, quantize=quantize)
        self.down = Linear(make, arch.ffn_size, (arch.hidden_size,), bias=arch.mlp_bias, quantize=quantize)

    def __call__(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
        context: Context,
        wanted: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x: the residual stream [n, hidden], overwritten → the stream after the block, or the rows `wanted` of it.

        Keys and values of all rows are stored; what follows attention is computed for the rows wanted.
        """
        y = self.attention(x, self.attention_norm.pair, positions, cos_sin, context)
        if wanted is not None:
            x, y = x[wanted], y[wanted]
        x = self.attention.out(y, residual=x)
        y = self.gate_up(x, norm=self.ffn_norm.pair, silu_mul=True)
        return self.down(y, residual=x)


class DenseModel:
    """The whole decoder. `make(*shape)` allocates a parameter; `cos_sin` is the table of `layers.rotary.rope_table`;
    `scheme` says what `pack` makes of the matrices."""

    def __init__(self, arch: ModelArch, make: Make, cos_sin: torch.Tensor, scheme: Rounded | None = None) -> None:
        quantize = None if scheme is None else scheme.product
        self.arch = arch
        self.cos_sin = cos_sin
        self._device = cos_sin.device
        self.embed = Embedding(make, arch.vocab_size, arch.hidden_size)
        self.blocks = [Block(arch, layer, make, quantize) for layer in range(arch.n_layers)]
        self.norm = RMSNorm(make, arch.hidden_size, arch.rms_eps)
        tied = self.embed.weight if arch.tie_embeddings else None
        self.head = Linear(make, arch.hidden_size, (arch.vocab_size,), tied=tied, quantize=quantize)

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        context: Context,
        wanted: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """token_ids, positions: [n] int32 or int64, over all spans of a step → states for `logits` [n, hidden].

        wanted: int64 [m], rows whose state is needed, None for all; the result is then [m, hidden], and the last
        block's feed-forward runs for those rows only. out: memory of the residual stream [n, hidden], which is the
        result if all rows are wanted.
        """
        x = self.embed(token_ids, out)
        for block in self.blocks[:-1]:
            x = block(x, positions, self.cos_sin, context)
        return self.blocks[-1](x, positions, self.cos_sin, context, wanted)

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """hidden: [m, hidden], rows of what `forward` returned → [m, vocab_size] float32, or `out`, which takes them in
        float32 or the model's dtype: the values are the same, as they are computed in the latter, as in transformers.
        """
        if out is None:
            out = torch.empty(len(hidden), self.arch.vocab_size, dtype=torch.float32, device=hidden.device)
        return self.head(hidden, norm=self.norm.pair, out=out)

    def build_kernels(self, max_rows: int) -> None:
        """Compile what the products of steps with up to max_rows rows need, so that no step has to wait for it."""
        block = self.blocks[0]  # the others have the same shapes
        layers = [
            block.attention.qkv.kernel(norm=True),
            block.attention.out.kernel(residual=True),
            block.gate_up.kernel(norm=True, silu_mul=True),
            block.down.kernel(residual=True),
            self.head.kernel(norm=True),
            self.head.kernel(norm=True, wide=True),
        ]
        gemm.build(layers, self.dtype, self.embed.weight.device, max_rows)

    def states(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [m, hidden], rows of what `forward` returned → the same after the final norm, float32."""
        return rms_norm(hidden, self.norm.weight, self.norm.eps).float()

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name in a checkpoint, contiguous view of the parameter that takes it), before anything is packed."""
        for name, layer, part in self._places():
            for kind, tensor in layer.part(part).items():
                yield f"{name}.{kind}", tensor

    def owners(self) -> dict[str, Linear]:
        """Name as in `weights` → the layer that can be packed once all its names have their values."""
        layers = [(name, layer, part) for name, layer, part in self._places() if isinstance(layer, Linear)]
        return {f"{name}.{kind}": layer for name, layer, part in layers for kind in layer.part(part)}

    @property
    def dtype(self) -> torch.dtype:
        """Of the residual stream."""
        return self.embed.weight.dtype

    def _places(self) -> Iterator[tuple[str, Part, int]]:
        """(name without kind, layer, index of the layer's part)."""
        for name, place, part in MODEL_NAMES if self.arch.tie_embeddings else MODEL_NAMES + HEAD_NAMES:
            yield name, operator.attrgetter(place)(self), part
        for i, block in enumerate(self.blocks):
            for name, place, part in BLOCK_NAMES:
                layer = operator.attrgetter(place)(block)
                if layer is not None:
                    yield f"model.layers.{i}.{name}", layer, part

    def linears(self) -> Iterator[Linear]:
        """All layers that have a matrix."""
        for block in self.blocks:
            yield from (block.attention.qkv, block.attention.out, block.gate_up, block.down)
        yield self.head

    def _norm_weights(self) -> list[torch.Tensor]:
        norms = [self.norm]
        for block in self.blocks:
            norms += [block.attention_norm, block.ffn_norm, block.attention.q_norm, block.attention.k_norm]
        return [norm.weight for norm in norms if norm is not None]

    @property
    def n_bytes(self) -> int:
        """Memory of all parameters as they are now: packed, quantised or neither."""
        tables = [self.embed.weight, *self._norm_weights()]
        return sum(table.nbytes for table in tables) + sum(linear.n_bytes for linear in self.linears())

    def leave_device(self) -> None:
        """Move every parameter into the host's memory. What was made for their addresses is void afterwards."""
        self._move(torch.device("cpu"))

    def enter_device(self) -> None:
        """Move every parameter to where it was made."""
        self._move(self._device)

    def _move(self, device: torch.device) -> None:
        """Tensors stay the same objects, so that a tied head stays tied. A packed product is on the CPU already."""
        tensors = [self.cos_sin, self.embed.weight, *self._norm_weights()]
        for linear in self.linears():
            tensors += [linear.weight] if linear.bias is None else [linear.weight, linear.bias]
        for tensor in {id(tensor): tensor for tensor in tensors}.values():
            if tensor.device != device:
                tensor.data = tensor.data.to(device)

    def pack(self) -> None:
        """Bring the matrices into the layout of the machine's products, when all weights are in place."""
        for linear in self.linears():
            linear.pack()
