"""How much of a prompt fits into a step beside decoding sequences without making them wait: an estimate from shapes.

Stall-free batching with a budget by cost, not by tokens (Agrawal et al. 2024, "Sarathi-Serve", section 4.2): a prompt
token far into a long prompt costs more, and a step with many sequences has room for more. Owns the estimate; where it
is applied is the scheduler's. Products and attention are taken to run one after the other, each at its roofline.
Where many wait beside few that decode, streams bear more: else a burst of requests fills its batch too slowly.
"""

from __future__ import annotations

import dataclasses

from quire.config.arch import ModelArch
from quire.planner.calibration import Ceilings
from quire.planner.shape import head_weights, kv_numbers_per_token, layer_weights, pair_flops, read_weights

EFFICIENCY = 0.65
"""Share of the ceiling of arithmetic that products of a few hundred rows and attention of short chunks reach."""
WAITING_WEIGHT = 8.0
"""So many times its factor a step may take longer where as many prompts wait behind the first as sequences decode:
docs/decisions/0006."""
MOST_BEHIND = 1.0
"""Prompts behind the first that count, for each sequence that decodes."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Costs of one model on one device, and how much longer a step may get by prompt tokens."""

    factor: float
    """A step with prompt tokens takes at most so many times as long as without them, unless many wait; above 1."""
    weights_s: float
    """Reading all weights once."""
    token_s: float
    """Matrix products of one token."""
    cached_s: float
    """Reading the K/V of one token."""
    pair_s: float
    """Attention of one prompt token to one token before it."""
    waiting_weight: float = WAITING_WEIGHT
    most_behind: float = MOST_BEHIND
    min_tokens: int = 32
    """A step takes at least so many prompt tokens: whatever the estimate says, a prompt goes on."""

    def step_s(self, n_decodes: int, n_cached: int, n_prompt: int, context: int) -> float:
        """Seconds of a step: `n_decodes` sequences with `n_cached` tokens in all, and `n_prompt` prompt tokens that
        attend to `context` tokens each."""
        products_s = max(self.weights_s, (n_decodes + n_prompt) * self.token_s)
        return products_s + n_cached * self.cached_s + n_prompt * context * self.pair_s

    def stretch(self, behind_per_decode: float) -> float:
        """How many times as long a step may take. behind_per_decode: requests whose prompts wait behind the first, for
        each sequence that decodes."""
        return 1 + (self.factor - 1) * (1 + self.waiting_weight * min(behind_per_decode, self.most_behind))

    def prompt_tokens(self, n_decodes: int, n_cached: int, context: int, behind_per_decode: float = 0.0) -> int:
        """The most prompt tokens with which the step takes `stretch` times its time without; at least `min_tokens`.
        behind_per_decode: see `stretch`."""
        spare_s = self.stretch(behind_per_decode) * self.step_s(n_decodes, n_cached, 0, 0) - n_cached * self.cached_s
        attention_s = context * self.pair_s
        n = (spare_s - n_decodes * self.token_s) / (self.token_s + attention_s)
        if attention_s > 0:
            n = min(n, (spare_s - self.weights_s) / attention_s)
        return max(self.min_tokens, int(n))


def pace_for(
    arch: ModelArch, ceilings: Ceilings, factor: float, weight_itemsize: float = 2, kv_itemsize: float = 2
) -> Pace:
    """The pace of a model with weights and K/V of these bytes a number; `factor` as in `Pace`."""
    body = arch.n_layers * layer_weights(arch)
    flops_per_s = EFFICIENCY * ceilings.rate("bfloat16")
    return Pace(
        factor=factor,
        weights_s=(body + head_weights(arch)) * weight_itemsize / ceilings.read_bytes_per_s,
        token_s=2 * arch.n_layers * read_weights(arch, 1) / flops_per_s,
        cached_s=kv_numbers_per_token(arch) * kv_itemsize / ceilings.read_bytes_per_s,
        pair_s=pair_flops(arch) / flops_per_s,
    )
