"""The layer of each kind of token mixer: a new kind is a file beside `attention` and a line here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from quire.compute.layers.attention import Attention
from quire.config.attention import AttentionSpec

MIXERS: Final[Mapping[type, Any]] = {AttentionSpec: Attention}
"""Type of a `MixerSpec` → what makes its `Mixer`, of (spec, parameters, layer, make, schemes, cos_sin)."""
