"""Launches of rows that a layer has beside those of a plain one, in which products take in what they can.

Owns the count. Does not own what a launch takes (`timing`). A plain layer has two norms and a rotation of its own;
activation and addition are parts of its products (`compute/layers`, where each of these launches is).
"""

from __future__ import annotations

import msgspec

from quire.config.attention import AttentionSpec
from quire.config.feed_forward import FeedForwardSpec
from quire.config.layers import LayerSpec, MixerSpec, NormKind, QKNormScope
from quire.config.parameters import LayerParameters


class Launches(msgspec.Struct, frozen=True):
    """Of one layer, or of several together."""

    n: int = 0
    """Norms, activations and additions that no product takes in, for any number of rows."""
    n_sums: int = 0
    """Those of them that add to the residual stream: two rows read and one written."""

    def times(self, n_layers: int) -> Launches:
        """Of so many layers."""
        return Launches(self.n * n_layers, self.n_sums * n_layers)

    def __add__(self, other: Launches) -> Launches:
        return Launches(self.n + other.n, self.n_sums + other.n_sums)


def launches_apart(spec: LayerSpec, parameters: LayerParameters) -> Launches:
    """A norm behind mixer or feed-forward is one, and then the addition is one; so is an addition with a factor, an
    activation that is not SwiGLU, a norm of queries or keys that is not part of their rotation, with its copy, and a
    limit of queries, keys and values.
    Norms before products that cannot take them in at few rows (LayerNorm) are not counted: no run has any."""
    n_norms = sum(norm is not None for norm in (parameters.attention_post_norm, parameters.ffn_post_norm))
    n_sums = n_norms if spec.residual_scale == 1.0 else 2
    n_others = int(isinstance(spec.ffn, FeedForwardSpec) and not spec.ffn.is_plain) + _of_mixer(spec.mixer)
    return Launches(n_norms + n_sums + n_others, n_sums)


def _of_mixer(mixer: MixerSpec) -> int:
    if not isinstance(mixer, AttentionSpec):
        return 0
    n = int(mixer.qkv_clip > 0)
    norm = mixer.qk_norm
    if norm is not None and (norm.scope is not QKNormScope.HEAD or norm.norm.kind is not NormKind.RMS):
        n += 4  # two norms, and a copy of each result
    return n
