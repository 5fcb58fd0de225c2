"""Train one attention layer with `flash_attention`: associative recall, each query asks for the value of its key.

    python examples/train_attention.py [--device cuda] [--steps 300] [--pairs 32]

A sequence is a list of (key, value) pairs in random order; the layer is shown queries, one for each key in another
order, and must name the values. Without attention the best loss is log(16) = 2.77. The variant is written here: logits
are capped, and the gradient goes through the cap.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

from quire.kernels.attention import Variant
from quire.kernels.attention.variant.expression import tanh
from quire.kernels.flash import flash_attention

N_VALUES, WIDTH, N_HEADS, N_KV_HEADS, HEAD_DIM, BATCH = 16, 64, 2, 1, 32, 16


class Recall(nn.Module):
    """Embeddings, one layer of grouped-query attention, and a classifier."""

    def __init__(self, n_keys: int) -> None:
        super().__init__()
        self.keys, self.values = nn.Embedding(n_keys, WIDTH), nn.Embedding(N_VALUES, WIDTH)
        self.query = nn.Linear(WIDTH, N_HEADS * HEAD_DIM, bias=False)
        self.key_value = nn.Linear(WIDTH, 2 * N_KV_HEADS * HEAD_DIM, bias=False)
        self.answer = nn.Linear(N_HEADS * HEAD_DIM, N_VALUES)
        capped = lambda logits, site, p: p.cap * tanh(logits / p.cap)  # noqa: E731
        self.variant = Variant(HEAD_DIM**-0.5, causal=False, logits_transform=capped, params={"cap": 30.0})

    def forward(self, keys: torch.Tensor, values: torch.Tensor, asked: torch.Tensor) -> torch.Tensor:
        """keys, values: [batch, pairs]; asked: [batch, queries]. Returns logits [batch, queries, N_VALUES]."""
        q = self.query(self.keys(asked)).unflatten(-1, (N_HEADS, HEAD_DIM))
        kv = self.key_value(self.keys(keys) + self.values(values)).unflatten(-1, (2, N_KV_HEADS, HEAD_DIM))
        k, v = kv.unbind(2)
        return self.answer(flash_attention(q, k, v, self.variant).flatten(2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--pairs", type=int, default=32)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    model = Recall(arguments.pairs).to(arguments.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(arguments.steps + 1):
        orders = torch.rand(2, BATCH, arguments.pairs, device=arguments.device).argsort(-1)
        values = torch.randint(N_VALUES, (BATCH, arguments.pairs), device=arguments.device)
        right = values.gather(1, orders[0].argsort(-1).gather(1, orders[1]))
        answers = model(orders[0], values, orders[1]).flatten(0, 1)
        loss = nn.functional.cross_entropy(answers, right.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 30 == 0:
            share = float((answers.argmax(-1) == right.flatten()).float().mean())
            print(f"step {step:4d}  loss {loss.item():.3f}  right {share:.1%}", flush=True)


if __name__ == "__main__":
    main()
