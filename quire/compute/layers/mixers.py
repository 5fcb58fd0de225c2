"""The layer of each kind of token mixer: a new kind is a file beside `attention` and a line here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from quire.compute.layers.attention import Attention
from quire.compute.layers.delta import Delta
from quire.compute.layers.gated_attention import GatedAttention
from quire.compute.layers.latent import LatentAttention
from quire.compute.layers.mamba import Mamba
from quire.compute.layers.short_conv import ShortConv
from quire.config.attention import AttentionSpec
from quire.config.delta import DeltaSpec
from quire.config.gated_attention import GatedAttentionSpec
from quire.config.latent import LatentAttentionSpec
from quire.config.mamba import MambaSpec
from quire.config.short_conv import ShortConvSpec

MIXERS: Final[Mapping[type, Any]] = {
    AttentionSpec: Attention,
    DeltaSpec: Delta,
    GatedAttentionSpec: GatedAttention,
    LatentAttentionSpec: LatentAttention,
    MambaSpec: Mamba,
    ShortConvSpec: ShortConv,
}
"""Type of a `MixerSpec` → what makes its `Mixer`, of (spec, parameters, layer, make, schemes, cos_sin)."""
