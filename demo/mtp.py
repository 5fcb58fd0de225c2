"""Owns the multi-token prediction module for training, with the tensor names that DeepSeek's checkpoints have.

One layer of the model's kind. Row p reads norms of the embedding of token p and of the model's last state at token
p - 1, joined by `eh_proj`; embedding and output matrix are the model's (DeepSeek-V3, arXiv 2412.19437, section 2.2).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .checkpoint import described
from .head import Attend, Drafting, States
from .model import Layer, Llama, RMSNorm, Shape


class SharedHead(nn.Module):
    """What stands before the model's output matrix."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm = RMSNorm(shape.hidden, shape.norm_eps)


class Mtp(Drafting):
    """A module; shape: of its layer, otherwise the model's."""

    def __init__(self, shape: Shape, model: Llama) -> None:
        super().__init__(shape, torch.arange(shape.vocabulary))
        self.eh_proj = nn.Linear(2 * shape.hidden, shape.hidden, bias=False)
        self.enorm = RMSNorm(shape.hidden, shape.norm_eps)
        self.hnorm = RMSNorm(shape.hidden, shape.norm_eps)
        self.layer = Layer(shape)
        self.shared_head = SharedHead(shape)
        self.start()
        self.shared_head.norm.load_state_dict(model.model.norm.state_dict())
        self._output = [model.model.embed_tokens.weight]  # in a list: no parameter of its own

    def features(self, states: States) -> Tensor:
        """See `Drafting`."""
        return states.last

    def read(self, embedded: Tensor, feature: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        """See `Drafting`."""
        x = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(feature)), -1))
        x = x + attend(self.layer.self_attn, self.layer.input_layernorm(x))
        x = x + self.layer.mlp(self.layer.post_attention_layernorm(x))
        x = self.shared_head.norm(x)
        return x, F.linear(x, self._output[0])

    def config(self, model: Shape) -> dict[str, Any]:
        """See `Drafting`: the layer's sizes stand under the model's keys."""
        return described(self.shape) | {
            "architectures": ["LlamaForCausalLM"], "num_hidden_layers": model.layers, "num_nextn_predict_layers": 1,
        }  # fmt: skip

    def stored(self, model: Shape) -> dict[str, Tensor]:
        """See `Drafting`."""
        prefix = f"model.layers.{model.layers}."
        return {prefix + name.removeprefix("layer."): p for name, p in self.named_parameters()}
