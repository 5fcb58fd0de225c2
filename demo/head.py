"""Owns what heads are for training, in plain torch, and the EAGLE-3 head with the tensor names of published ones.

Row p reads token p and the feature of token p - 1 (zeros for the first) and guesses token p + 1; behind the known
tokens the feature is the head's own state. EAGLE-3's is three states of the model, joined by `fc` (Li et al. 2025).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from .checkpoint import described
from .model import MLP, Attention, Llama, RMSNorm, Shape, rotate


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


class States(NamedTuple):
    """What heads learn from, each [batch, length, ...]."""

    embedded: Tensor
    """Of the tokens."""
    tapped: Tensor
    """Three states, side by side."""
    last: Tensor
    """The last state, after the final norm."""
    logits: Tensor


class Drafting(nn.Module):
    """What heads have in common. shape: of the head; chosen: int64 [vocabulary], the model's ids of its own, rising."""

    chosen: Tensor

    def __init__(self, shape: Shape, chosen: Tensor) -> None:
        super().__init__()
        self.shape = shape
        self.register_buffer("chosen", chosen, persistent=False)

    def start(self) -> None:
        """Random weights."""
        for name, p in self.named_parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.005 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02)

    def features(self, states: States) -> Tensor:
        """What each row leaves for the next one to read, [batch, length, hidden]."""
        raise NotImplementedError

    def read(self, embedded: Tensor, feature: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        """(the feature for the guess after this one, logits [batch, length, vocabulary])."""
        raise NotImplementedError

    def config(self, model: Shape) -> dict[str, Any]:
        """Its config.json, as published ones are."""
        raise NotImplementedError

    def stored(self, model: Shape) -> dict[str, Tensor]:
        """Name in a checkpoint → parameter."""
        return dict(self.named_parameters())

    def maps(self, model: Shape) -> dict[str, Tensor]:
        """Tensors of a checkpoint that say which of the model's ids it knows."""
        return {}

    def forward(self, states: States, angles: tuple[Tensor, Tensor], n_steps: int) -> list[Tensor]:
        """Logits [batch, length, vocabulary] of the first guess of each row, of the guess after that, and so on.

        angles: cos and sin, [length, head_dim]. Guess j of row a reads token a + j and its own state before, and
        attends to what the true features of rows up to a gave, then to its own chain: as in use ("training-time test").
        """
        features = self.features(states)
        x = torch.cat((torch.zeros_like(features[:, :1]), features[:, :-1]), 1)
        found: list[Tensor] = []
        n = x.shape[1]
        attend = Attend(self.shape)
        for step in range(n_steps):
            ahead = torch.arange(n, device=x.device).add(step).clamp(max=n - 1)
            attend.angles = angles[0][ahead], angles[1][ahead]
            x, logits = self.read(states.embedded[:, ahead], x, attend)
            found.append(logits)
        return found


class Attend:
    """Attention of the steps so far: a guess sees the first step's rows up to its own, and its own chain."""

    def __init__(self, shape: Shape) -> None:
        self._shape, self._keys = shape, list[tuple[Tensor, Tensor]]()
        self.angles: tuple[Tensor, Tensor] = (torch.empty(0), torch.empty(0))

    def __call__(self, projections: HeadAttention | Attention, x: Tensor) -> Tensor:
        """x: [batch, length, what the projections read] -> [batch, length, hidden]."""
        s, angles = self._shape, self.angles
        q, k, v = (
            proj(x).unflatten(-1, (-1, s.head_dim)).transpose(1, 2)
            for proj in (projections.q_proj, projections.k_proj, projections.v_proj)
        )
        group = s.heads // s.kv_heads
        q, k = rotate(q, *angles), rotate(k, *angles).repeat_interleave(group, 1)
        self._keys.append((k, v.repeat_interleave(group, 1)))
        (first_k, first_v), *chain = self._keys
        n = q.shape[2]
        hidden = torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1)
        scores = (q @ first_k.transpose(2, 3)).masked_fill(hidden, float("-inf"))
        own = [(q * own_k).sum(-1, keepdim=True) for own_k, _ in chain]
        weights = (torch.cat((scores, *own), -1).float() * s.head_dim**-0.5).softmax(-1).to(q.dtype)
        y = weights[..., :n] @ first_v
        for i, (_, own_v) in enumerate(chain):
            y = y + weights[..., n + i : n + i + 1] * own_v
        found: Tensor = projections.o_proj(y.transpose(1, 2).flatten(2))
        return found


class Head(Drafting):
    """An EAGLE-3 head; its vocabulary is the small one."""

    def __init__(self, shape: Shape, chosen: Tensor) -> None:
        super().__init__(shape, chosen)
        self.fc = nn.Linear(3 * shape.hidden, shape.hidden, bias=False)
        self.midlayer = HeadLayer(shape)
        self.norm = RMSNorm(shape.hidden, shape.norm_eps)
        self.lm_head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)
        self.start()

    def features(self, states: States) -> Tensor:
        """See `Drafting`."""
        joined: Tensor = self.fc(states.tapped)
        return joined

    def read(self, embedded: Tensor, feature: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        """See `Drafting`."""
        layer = self.midlayer
        both = torch.cat((layer.input_layernorm(embedded), layer.hidden_norm(feature)), -1)
        x = feature + attend(layer.self_attn, both)
        x = x + layer.mlp(layer.post_attention_layernorm(x))
        return x, self.lm_head(self.norm(x))

    def config(self, model: Shape) -> dict[str, Any]:
        """See `Drafting`."""
        return described(self.shape) | {
            "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "vocab_size": model.vocabulary,
            "draft_vocab_size": self.shape.vocabulary, "tie_word_embeddings": False,
            "eagle_config": {  # there it names the layers that leave the states
                "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in tapped_layers(model.layers)]
            },
        }  # fmt: skip

    def maps(self, model: Shape) -> dict[str, Tensor]:
        """See `Drafting`."""
        chosen = self.chosen.cpu()
        known = torch.zeros(model.vocabulary, dtype=torch.bool).index_fill_(0, chosen, True)
        return {"d2t": chosen - torch.arange(len(chosen)), "t2d": known}


def model_states(model: Llama, tokens: Tensor) -> States:
    """Of the model that heads guess for; tokens: [batch, length]."""
    embedded = model.model.embed_tokens(tokens)
    x, taps = embedded, []
    n = tokens.shape[1]
    tapped = tapped_layers(model.shape.layers)
    for i, layer in enumerate(model.model.layers):
        if i in tapped:
            taps.append(x)
        x = layer(x, model.cos[:n].to(x.dtype), model.sin[:n].to(x.dtype))
    last = model.model.norm(x)
    return States(embedded, torch.cat(taps, -1), last, F.linear(last, model.model.embed_tokens.weight))


def load_into(learner: Drafting, model: Shape, folder: Path) -> None:
    """Take the weights that `save` wrote."""
    tensors = load_file(str(folder / "model.safetensors"))
    with torch.no_grad():
        for name, p in learner.stored(model).items():
            p.copy_(tensors[name])


def save(learner: Drafting, model: Shape, folder: Path) -> None:
    """Write config.json and model.safetensors, in bfloat16."""
    tensors = {name: p.detach().to("cpu", torch.bfloat16).contiguous() for name, p in learner.stored(model).items()}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(learner.config(model), indent=2) + "\n")
    path = folder / "model.safetensors"
    save_file(tensors | learner.maps(model), str(path), metadata={"format": "pt"})
    path.chmod(0o644)
