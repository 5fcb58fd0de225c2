"""The layer of each kind of feed-forward: a new kind is a file beside `feed_forward` and a line here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from quire.compute.layers.experts import Experts
from quire.compute.layers.feed_forward import FeedForward
from quire.compute.layers.no_ffn import NoFfn
from quire.config.experts import ExpertsSpec
from quire.config.feed_forward import FeedForwardSpec
from quire.config.no_ffn import NoFfnSpec

FFNS: Final[Mapping[type, Any]] = {
    FeedForwardSpec: FeedForward,
    ExpertsSpec: Experts,
    NoFfnSpec: NoFfn,
}
"""Type of an `FfnSpec` → what makes its `Ffn`, of (spec, parameters, make, schemes, norm behind it, factor)."""
