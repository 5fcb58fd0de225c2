"""Heads: one decoder layer that guesses for a model from the model's own states, as data. Torch-free.

Owns how the kinds of heads differ (`HeadLayout`), a table each, and what of a model a head must fit. Does not own how
config.json files say it (`eagle`, `mtp`), nor what is computed (`compute/draft/head`).
Invariant: a `HeadArch` is one that can be computed; everything else was a ConfigError.
"""

from __future__ import annotations

from typing import Final

import msgspec

from quire.config.arch import ModelArch
from quire.core.errors import ConfigError

TAPS: Final = "eagle_aux_hidden_state_layer_ids"
N_TAPS: Final = 3


class HeadLayout(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of head: the names of its tensors in a checkpoint, and what it reads. Names are without .weight."""

    what: str
    """What messages call it."""
    prefix: str = ""
    """Of all its tensors; {behind}: the layers of the model and its own number, {number}: its own."""
    layer: str = ""
    """Behind that, of the tensors of its layer."""
    taps: str = ""
    """Matrix that joins three states of the model; none: it reads the model's last state as it is."""
    join: str = ""
    """Matrix that makes the layer's input of a token and a feature; behind the known tokens the feature is then the
    head's state after its norm. None: the layer's projections are twice as wide, and it is the state itself."""
    feature_first: bool = False
    """The columns of the feature stand before those of the token."""
    embedded_norm: str = ""
    """None: the layer's first."""
    feature_norm: str
    norm: str
    """Before the output matrix."""
    head: str = ""
    """Output matrix; none: it is the model's."""
    embedding: str = ""
    """A table of its own that a checkpoint may have; it is the model's otherwise."""
    offsets: str = ""
    """int64 [own vocabulary]: what its ids lack to be the model's."""
    not_read: tuple[str, ...] = ()
    """What a checkpoint may have besides: it follows from the rest, or is the model's."""
    reads_normed: bool = False
    """The model's state is that behind its final norm."""


EAGLE3: Final = HeadLayout(
    what="head", layer="midlayer.", taps="fc", feature_norm="midlayer.hidden_norm", norm="norm", head="lm_head",
    embedding="embed_tokens", offsets="d2t", not_read=("t2d",),
)  # fmt: skip
"""Li et al. 2025, "EAGLE-3", arXiv 2503.01840, as published heads are stored."""
NEXTN: Final = HeadLayout(
    what="MTP module", prefix="model.layers.{behind}.", join="eh_proj", embedded_norm="enorm", feature_norm="hnorm",
    norm="shared_head.norm", not_read=("embed_tokens.weight", "shared_head.head.weight"), reads_normed=True,
)  # fmt: skip
"""DeepSeek-V3 technical report, arXiv 2412.19437, section 2.2; GLM-4.5 and others name their tensors alike."""


class HeadArch(msgspec.Struct, frozen=True, kw_only=True):
    """A head."""

    layout: HeadLayout
    arch: ModelArch
    """Its layer, norm and vocabulary, as a model of one layer."""
    vocab_size: int
    """Token ids of the model that it guesses for."""
    prefix: str = ""
    """Of its tensors' names."""
    taps: tuple[int, ...] = ()
    """Layers of the model whose inputs it reads, the lowest first; empty: those of `taps_of`."""

    def taps_of(self, n_layers: int) -> tuple[int, ...]:
        """The layers of a model of n_layers whose inputs are read, n_layers being what the last one leaves; where an
        EAGLE-3 head does not say, those that all published heads were trained with."""
        if not self.layout.taps:
            return (n_layers,)
        return self.taps or (2, n_layers // 2, n_layers - 3)

    def check(self, name: str, model: ModelArch) -> None:
        """ConfigError unless it can guess for this model. name: of its checkpoint."""
        what, param = f"the {self.layout.what} {name}", "speculative_config"
        cure = f"give a {self.layout.what} that was trained for this model"
        if self.arch.hidden_size != model.hidden_size:
            raise ConfigError(
                f"{what} reads states of {self.arch.hidden_size} numbers and those of the model have "
                f"{model.hidden_size}: {cure}",
                param=param,
            )
        if self.vocab_size != model.vocab_size:
            raise ConfigError(
                f"{what} guesses for {self.vocab_size} token ids and the model has {model.vocab_size}: {cure}",
                param=param,
            )
        taps = self.taps_of(model.n_layers)
        if self.layout.taps and (sorted(set(taps)) != list(taps) or taps[0] < 0 or taps[-1] >= model.n_layers):
            raise ConfigError(
                f"{what} reads the states before layers {', '.join(map(str, taps))} and the model has "
                f"{model.n_layers}, from 0: {cure}, or set {TAPS} at the top level of its config.json, not in "
                f"eagle_config, to three rising numbers from 0 to {model.n_layers - 1}",
                param=param,
            )
