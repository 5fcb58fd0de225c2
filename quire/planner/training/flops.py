"""FLOPs of training a token: 6 a parameter that it goes through and what attention adds; more with recomputation.

Forward 2 N (Kaplan et al. 2020, section 2.1), backward twice that; with full checkpointing a second forward, 8 N
(Narayanan et al. 2021, section 5.1: 96 B s l h² (1 + s/6h + V/16lh)). Norms, activations and scans of recurrent layers
are left out. A pair of a token and one that it sees costs 4 a head dimension forward.
"""

from __future__ import annotations

from typing import Any

import msgspec

from quire.config.arch import ModelArch
from quire.config.latent import LatentAttentionSpec
from quire.planner.shape import head_weights, read_weights
from quire.planner.training.setup import Checkpointing


class TokenFlops(msgspec.Struct, frozen=True):
    """Of one token, forward, in the mean over a sequence."""

    matrices: float
    """Of layers."""
    pairs: float
    """Of attention."""
    head: float

    @property
    def forward(self) -> float:
        return self.matrices + self.pairs + self.head

    @property
    def training(self) -> float:
        """Forward and backward once: what "model FLOPs" are (Chowdhery et al. 2022, appendix B)."""
        return 3 * self.forward

    def executed(self, checkpointing: Checkpointing) -> float:
        """What a device computes, recomputation counted in. Backward passes of FlashAttention, which make scores again,
        count as others."""
        again = {Checkpointing.NONE: 0.0, Checkpointing.SELECTIVE: self.pairs}.get(checkpointing)
        return self.training + (self.matrices + self.pairs if again is None else again)


def token_flops(arch: ModelArch, seq_len: int, *, masked: bool = False) -> TokenFlops:
    """masked: pairs that the causal mask hides count too, as papers do for MFU; else only those that are seen."""
    matrices = 2 * arch.n_layers * read_weights(arch, 1)
    pairs = sum(_pair_flops(layer.mixer) * _n_seen(layer.mixer, seq_len, masked) for layer in arch.layers)
    return TokenFlops(matrices, pairs, 2.0 * head_weights(arch))


def active_parameters(arch: ModelArch) -> float:
    """Those in products of a token: matrices of the chosen experts and the head; embeddings are only read."""
    return arch.n_layers * read_weights(arch, 1) + head_weights(arch)


def _pair_flops(mixer: Any) -> int:
    """Of all heads, forward. Latent attention trains on heads as they are, not on lines."""
    if isinstance(mixer, LatentAttentionSpec):
        return 2 * mixer.n_heads * (mixer.qk_head_dim + mixer.v_head_dim)
    return int(mixer.n_pair_flops)


def _n_seen(mixer: Any, seq_len: int, masked: bool) -> float:
    """Tokens that one sees, in the mean."""
    spec = mixer.kv_spec
    if spec is None:
        return 0.0
    window = min(spec.window or seq_len, seq_len)
    return float(window) if masked else window * (2 * seq_len - window + 1) / (2 * seq_len)
