"""Which models have kernels of their own, on a CPU, for rows that are to be alone (`kernels/invariance`).

All others are computed by kernels whose rows are alone in any case. Owns the list of what is not: torch's products of
each head, and functions of elements that torch computes.
"""

from __future__ import annotations

from quire.config.arch import ModelArch
from quire.config.experts import ExpertsSpec, Gating
from quire.config.feed_forward import FeedForwardSpec
from quire.config.gated_attention import GatedAttentionSpec
from quire.config.latent import LatentAttentionSpec
from quire.config.layers import LayerSpec
from quire.kernels.act.elements import BY_PLACE
from quire.kernels.invariance import RowsAlone


def rows_alone_on_cpu(arch: ModelArch, *, deterministic: bool) -> RowsAlone:
    """Which steps of this model, whole, are launched so. deterministic: every request asks."""
    if not any(map(_has_two_kinds, arch.layers)):
        return RowsAlone.NEVER
    return RowsAlone.ALWAYS if deterministic else RowsAlone.ASKED


def _has_two_kinds(layer: LayerSpec) -> bool:
    if isinstance(layer.mixer, LatentAttentionSpec | GatedAttentionSpec):
        return True
    ffn = layer.ffn
    if isinstance(ffn, ExpertsSpec):
        return ffn.gating != Gating() or (ffn.shared is not None and ffn.shared.gated)
    return isinstance(ffn, FeedForwardSpec) and not ffn.is_plain and ffn.activation.value in BY_PLACE
