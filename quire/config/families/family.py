"""`Family`: what is known of the models of one architecture: their config.json, and the names in their checkpoints."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from quire.config.arch import ModelArch
from quire.config.fields import Fields
from quire.config.heads import NEXTN, HeadLayout
from quire.config.model_fields import ModelFields


@enum.unique
class Order(enum.Enum):
    """How a checkpoint holds the rows of a parameter."""

    ROWS = "rows"
    """As Quire does: [out, in], q above k above v, the halves of a head as rotary pairs."""
    TRANSPOSED = "transposed"
    """[in, out], as GPT-2's Conv1D."""
    GROUPED = "grouped"
    """Group by group, where parts stand one behind the other: for each key head its query heads, its key, its value
    (GPT-NeoX, Falcon). Which, says the mixer (`MixerSpec.grouped`)."""


class Stored(msgspec.Struct, frozen=True):
    """Where a tensor of a checkpoint goes."""

    name: str
    """As in `config.parameters`, after the layer's prefix where the checkpoint's name has `{}`."""
    order: Order = Order.ROWS
    alternates: bool = False
    """Rows of the gate and of up take turns (gpt-oss)."""


Names = Mapping[str, str | Stored]
"""Name in a checkpoint, without .weight or .bias, `{}` for a layer's number → name of a parameter, after the layer's
prefix where the left has `{}`; a second `{}`, on both sides, is for the row of a norm whose rows are stored apart, or
for an expert. A name that is not here is a parameter's name already."""
Stacks = Mapping[str, Stored]
"""Name in a checkpoint of a tensor with a parameter of each expert, `{}` for a layer's number → their names, likewise,
with `{}` for the expert's number. Both with what they end in."""
STACKS: Final[Stacks] = {
    "model.layers.{}.mlp.experts.gate_up_proj": Stored("mlp.experts.{}.gate_up_proj.weight"),
    "model.layers.{}.mlp.experts.down_proj": Stored("mlp.experts.{}.down_proj.weight"),
}
"""As transformers 5 has them in memory."""
GGUF_STACKS: Final[Stacks] = {
    f"model.layers.{{}}.mlp.experts.{name}": Stored(f"mlp.experts.{{}}.{name}")
    for name in (f"{matrix}.{kind}" for matrix in ("gate_proj", "up_proj", "down_proj") for kind in ("weight", "bias"))
}
"""As GGUF files have them, whose tensors have the names of parameters otherwise."""

SHARED_NAMES: Final = {
    f"model.layers.{{}}.mlp.shared_experts.{name}": f"mlp.shared_expert.{name}"
    for name in ("gate_proj", "up_proj", "gate_up_proj", "down_proj")
}
"""As DeepSeek and its kin have them."""


class Gguf(msgspec.Struct, frozen=True, kw_only=True):
    """The GGUF files of one architecture."""

    architecture: str
    """Their general.architecture."""
    variants: Mapping[str, str] = {}
    """Key after the architecture's name → architecture in config.json that one means where it is not 0; the first."""
    interleaved: bool = False
    """The rows of q and k alternate between the halves of a head."""
    keys: Mapping[str, str] = {}
    """Field of config.json → key after the architecture's name: beside those of most, or in their place. All must be
    there. With a sliding window among them, the family says which layers have it; else all have."""
    optional: Mapping[str, str] = {}
    """As `keys`, of those that a file may lack."""
    plain: Mapping[str, tuple[object, ...]] = {}
    """Key → its only values that are computed rightly."""
    fields: Mapping[str, Any] = {}
    """Fields of config.json that hold for all of them."""
    n_layers_by_width: int = 0
    """Their queries are divided by the root of `query_pre_attn_scalar`, which no key says: it is the width of a head,
    but in the model of so many layers hidden_size / heads. 0: families that do not read it."""
    yarn: Mapping[str, Any] = {}
    """Fields of `rope_parameters` of type yarn that they do not say."""
    names: Mapping[str, str] = {}
    """Tensor of a block, without its kind → name of a parameter, without the layer's: in the place of most."""


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """One architecture."""

    name: str
    architecture: str
    """Its name in config.json."""
    model_type: str
    describe: Callable[[ModelFields], ModelArch]
    """Raises ConfigError naming field, value and limit."""
    keys: Mapping[str, str] = {}
    """Key that most families have → its name in this one's config.json."""
    assumed: Mapping[str, int] = {}
    """Key that config.json may lack, though nearly all families demand it → its value then."""
    other_layout: Callable[[Fields], str] = lambda _: ""
    """Of a config.json that names no architecture: a sentence if it is this one's as another library writes it."""
    names: Names = {}
    stacks: Stacks = {}
    """Beside `STACKS`, or in their place."""
    computed: tuple[str, ...] = ()
    """Names, `{}` as above, of tensors that checkpoints carry and every model computes."""
    unread: tuple[str, ...] = ()
    """Beginnings of names of tensors that checkpoints carry and that are no part of the model."""
    mtp: HeadLayout = NEXTN
    """Of the multi-token prediction modules that its checkpoints may have."""
    gguf: Gguf | None = None
    """None: its GGUF files are not read."""
