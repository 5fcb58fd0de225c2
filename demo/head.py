"""Owns the EAGLE-3 head for training, in plain torch, with the tensor names of published heads.

Row p reads token p and the feature of token p - 1 (zeros for the first) and guesses token p + 1. A feature is three
states of the model, joined by `fc`; behind the known tokens it is the head's own state (Li et al. 2025, "EAGLE-3").
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from .model import MLP, Llama, RMSNorm, Shape, rotate


def tapped_layers(n_layers: int) -> tuple[int, int, int]:
    """The layers whose inputs are read: those of published heads."""
    return 2, n_layers // 2, n_layers - 3


class HeadAttention(nn.Module):
    """The projections of the layer; queries and keys come from an embedding and a feature, side by side."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        q_size, kv_size = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(2 * shape.hidden, q_size, bias=False)
        self.k_proj = nn.Linear(2 * shape.hidden, kv_size, bias=False)
        self.v_proj = nn.Linear(2 * shape.hidden, kv_size, bias=False)
        self.o_proj = nn.Linear(q_size, shape.hidden, bias=False)


class HeadLayer(nn.Module):
    """The decoder layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn = HeadAttention(shape)
        self.mlp = MLP(shape)
        self.input_layernorm = RMSNorm(shape.hidden, shape.norm_eps)
        self.hidden_norm = RMSNorm(shape.hidden, shape.norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden, shape.norm_eps)


class Head(nn.Module):
    """shape: of the head, its vocabulary the small one; chosen: int64 [vocabulary], the model's ids of that, rising."""

    chosen: Tensor

    def __init__(self, shape: Shape, chosen: Tensor) -> None:
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(3 * shape.hidden, shape.hidden, bias=False)
        self.midlayer = HeadLayer(shape)
        self.norm = RMSNorm(shape.hidden, shape.norm_eps)
        self.lm_head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)
        self.register_buffer("chosen", chosen, persistent=False)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.005 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02)

    def forward(self, embedded: Tensor, states: Tensor, angles: tuple[Tensor, Tensor], n_steps: int) -> list[Tensor]:
        """Logits [batch, length, vocabulary] of the first guess of each row, of the guess after that, and so on.

        embedded: [batch, length, hidden], of the tokens; states: [batch, length, 3 * hidden]; angles: cos and sin,
        [length, head_dim]. Guess j of row a reads token a + j and its own state before, and attends to what the true
        features of rows up to a gave, then to its own chain: as in use ("training-time test").
        """
        features = self.fc(states)
        x = torch.cat((torch.zeros_like(features[:, :1]), features[:, :-1]), 1)
        found: list[Tensor] = []
        keys: list[tuple[Tensor, Tensor]] = []
        n = embedded.shape[1]
        for step in range(n_steps):
            ahead = torch.arange(n, device=x.device).add(step).clamp(max=n - 1)
            x = self._layer(embedded[:, ahead], x, (angles[0][ahead], angles[1][ahead]), keys)
            found.append(self.lm_head(self.norm(x)))
        return found

    def _layer(
        self, embedded: Tensor, feature: Tensor, angles: tuple[Tensor, Tensor], keys: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """One step for every row; keys and values of the steps so far, which it adds its own to."""
        layer, s = self.midlayer, self.shape
        both = torch.cat((layer.input_layernorm(embedded), layer.hidden_norm(feature)), -1)
        q, k, v = (
            proj(both).unflatten(-1, (-1, s.head_dim)).transpose(1, 2)
            for proj in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj)
        )
        group = s.heads // s.kv_heads
        q, k = rotate(q, *angles), rotate(k, *angles).repeat_interleave(group, 1)
        keys.append((k, v.repeat_interleave(group, 1)))
        (first_k, first_v), chain = keys[0], keys[1:]
        n = q.shape[2]
        hidden = torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1)
        scores = (q @ first_k.transpose(2, 3)).masked_fill(hidden, float("-inf"))
        own = [(q * own_k).sum(-1, keepdim=True) for own_k, _ in chain]
        weights = (torch.cat((scores, *own), -1).float() * s.head_dim**-0.5).softmax(-1).to(q.dtype)
        y = weights[..., :n] @ first_v
        for i, (_, own_v) in enumerate(chain):
            y = y + weights[..., n + i : n + i + 1] * own_v
        x = feature + layer.self_attn.o_proj(y.transpose(1, 2).flatten(2))
        return x + layer.mlp(layer.post_attention_layernorm(x))


def model_states(model: Llama, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What a head learns from: embeddings [batch, length, hidden], states [.., 3 * hidden], logits [.., vocabulary]."""
    embedded = model.model.embed_tokens(tokens)
    x, taps = embedded, []
    n = tokens.shape[1]
    tapped = tapped_layers(model.shape.layers)
    for i, layer in enumerate(model.model.layers):
        if i in tapped:
            taps.append(x)
        x = layer(x, model.cos[:n].to(x.dtype), model.sin[:n].to(x.dtype))
    return embedded, torch.cat(taps, -1), F.linear(model.model.norm(x), model.model.embed_tokens.weight)


def load_into(head: Head, folder: Path) -> None:
    """Take the weights that `save` wrote."""
    tensors = load_file(str(folder / "model.safetensors"))
    head.load_state_dict({name: tensors[name].float() for name, _ in head.named_parameters()})


def save(head: Head, model: Shape, folder: Path) -> None:
    """Write config.json and model.safetensors as published heads have them, in bfloat16."""
    s = head.shape
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "attention_bias": False, "mlp_bias": False,
        "hidden_act": "silu", "hidden_size": s.hidden, "num_hidden_layers": 1, "num_attention_heads": s.heads,
        "num_key_value_heads": s.kv_heads, "head_dim": s.head_dim, "intermediate_size": s.intermediate,
        "vocab_size": model.vocabulary, "draft_vocab_size": s.vocabulary, "max_position_embeddings": s.max_length,
        "rope_theta": s.rope_theta, "rms_norm_eps": s.norm_eps, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "eagle_config": {"eagle_aux_hidden_state_layer_ids": tapped_layers(model.layers)},
    }  # fmt: skip
    chosen = head.chosen.cpu()
    tensors = {name: p.detach().to("cpu", torch.bfloat16).contiguous() for name, p in head.named_parameters()}
    tensors["d2t"] = chosen - torch.arange(len(chosen))
    tensors["t2d"] = torch.zeros(model.vocabulary, dtype=torch.bool).index_fill_(0, chosen, True)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    path = folder / "model.safetensors"
    save_file(tensors, str(path), metadata={"format": "pt"})
    path.chmod(0o644)
