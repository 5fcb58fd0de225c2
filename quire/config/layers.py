"""What a decoder layer is made of, as data: a token mixer, a feed-forward, norms, and where they stand.

Owns the vocabulary of descriptions and what each part stores. Does not own how a config.json says it (`families`), nor
how anything is computed. Invariant: a description holds plain values only, so it can be compared, printed and sent.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Protocol

import msgspec

from quire.config.rope import Rope
from quire.config.states import StateSpec

if TYPE_CHECKING:
    from quire.config.parameters import FfnParameters, MixerParameters


@enum.unique
class NormKind(enum.Enum):
    """How a norm measures its input."""

    RMS = "rms"
    """x / sqrt(mean(x²) + eps) (Zhang and Sennrich 2019)."""
    LAYER = "layer"
    """(x - mean) / sqrt(variance + eps) (Ba et al. 2016)."""


@enum.unique
class Placement(enum.Enum):
    """Where a layer's norms stand around its two parts f and g, x being the residual stream."""

    BEFORE = "before"
    """x + f(norm(x)), then x + g(norm(x)) (GPT-2, Llama)."""
    AFTER = "after"
    """x + norm(f(x)), then x + norm(g(x)) (OLMo 2)."""
    BOTH = "both"
    """x + norm(f(norm(x))), then x + norm(g(norm(x))) (Gemma 2)."""
    PARALLEL = "parallel"
    """x + f(norm(x)) + g(norm'(x)) (GPT-NeoX)."""
    SHARED = "shared"
    """x + f(n) + g(n), n being norm(x) (Falcon, Cohere)."""


@enum.unique
class Activation(enum.Enum):
    """The function between the matrices of a feed-forward."""

    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    RELU = "relu"
    RELU2 = "relu2"


@enum.unique
class QKNormScope(enum.Enum):
    """Over what a norm of queries and keys goes."""

    HEAD = "head"
    """Each head, with weights that all heads share (Qwen 3)."""
    HEADS = "heads"
    """Each head, with weights of its own (Cohere)."""
    APART = "apart"
    """As HEADS, each head's weights a tensor of their own (StableLM)."""
    ALL = "all"
    """All heads of a token as one vector (OLMo 2)."""


class NormSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A norm over the last dimension."""

    eps: float
    kind: NormKind = NormKind.RMS
    weight: bool = True
    bias: bool = False
    offset: float = 0.0
    """Added to the stored weight (1 in Gemma)."""

    @property
    def words(self) -> str:
        """What it is, for people."""
        found = ["RMS" if self.kind is NormKind.RMS else "LayerNorm"] + (["1 + w"] if self.offset else [])
        found += ([] if self.weight else ["no weight"]) + (["bias"] if self.bias else [])
        return f"{' with '.join((found[0], ' and '.join(found[1:]))) if found[1:] else found[0]}, epsilon {self.eps:g}"


class QKNorm(msgspec.Struct, frozen=True, kw_only=True):
    """A norm of queries and keys, before their rotation."""

    norm: NormSpec
    scope: QKNormScope = QKNormScope.HEAD


class KVSpec(msgspec.Struct, frozen=True):
    """What a token leaves behind in a layer, and how long that is needed."""

    n_kv_heads: int
    head_dim: int
    """A token leaves a key of [n_kv_heads, head_dim], and beside it a value like it."""
    window: int = 0
    """w > 0: a token is seen by itself and by the w - 1 after it; 0: by all after it."""
    value_in_key: int = 0
    """v > 0: the value is the first v numbers of the key, and lies nowhere else."""

    @property
    def numbers(self) -> int:
        """Numbers that a token leaves in one layer."""
        return (1 if self.value_in_key else 2) * self.n_kv_heads * self.head_dim


class Rotated(msgspec.Struct, frozen=True):
    """Rows of a parameter that are rotated, and so may be stored as pairs of neighbours."""

    n_heads: int
    """Equal parts of its rows, each with rows that are rotated."""
    first: int
    """Of these rows in a head."""
    number: int


class MixerSpec(Protocol):
    """What mixes the tokens of a sequence: the only part of a layer that sees more than one. Each kind is a file
    (`attention`), and has a layer in `compute/layers/mixers`."""

    @property
    def n_heads(self) -> int:
        """That read what tokens leave; a rank's own, where it has a part."""
        ...

    @property
    def rope(self) -> Rope | None:
        """None: positions are not rotated in."""
        ...

    @property
    def rope_head_dim(self) -> int:
        """Dimensions of a head of which `rope` rotates its share."""
        ...

    @property
    def kv_spec(self) -> KVSpec | None:
        """What it keeps of every token; None: nothing."""
        ...

    @property
    def state_spec(self) -> StateSpec | None:
        """What it keeps of a sequence, whatever its length; None: nothing."""
        ...

    @property
    def n_row_numbers(self) -> int:
        """Numbers of a token that are there at once while it is computed, its input and result left out."""
        ...

    @property
    def n_pair_flops(self) -> int:
        """Operations of all heads for one token and one that it sees."""
        ...

    def spared_flops(self, n_rows: int, n_keys: int) -> int:
        """Operations less than `n_pair_flops` for each pair, where there is another way to compute a span of `n_rows`
        rows, the last of `n_keys` tokens; below 0 where that takes more."""
        ...

    @property
    def words(self) -> str:
        """What it is, for people; `position_words` left out."""
        ...

    @property
    def position_words(self) -> tuple[str, ...]:
        """How it tells positions apart."""
        ...

    def parameters(self, at: str, hidden_size: int) -> MixerParameters:
        """What it stores, in the layer whose names begin with `at`; the last product's place is 'out'."""
        ...

    def rotated(self, name: str) -> Rotated | None:
        """Of the parameter `name` behind its module, as 'q_proj'; None: no row of it is rotated."""
        ...

    def grouped(self, name: str) -> tuple[int, ...]:
        """Of the parameter `name`, as above, rows of each part in a group, where a checkpoint has it in groups."""
        ...

    def share(self, rank: int, n_ranks: int) -> MixerSpec:
        """What rank `rank` of several computes. Raises ConfigError where it cannot be divided."""
        ...


class FfnSpec(Protocol):
    """What a layer makes of each token by itself. Each kind is a file (`feed_forward`, `experts`), and has a layer in
    `compute/layers`."""

    @property
    def size(self) -> int:
        """Of its widest inner vector."""
        ...

    @property
    def is_plain(self) -> bool:
        """Whether it is SwiGLU."""
        ...

    @property
    def words(self) -> str:
        """What it is, for people."""
        ...

    def n_row_numbers(self, hidden_size: int) -> int:
        """Numbers of a token that are there at once while it is computed, its input and result left out."""
        ...

    def n_idle_weights(self, hidden_size: int, n_tokens: int) -> float:
        """Weights that a step of so many tokens does not need, in the mean."""
        ...

    def parameters(self, at: str, hidden_size: int) -> FfnParameters:
        """What it stores, in the layer whose names begin with `at`."""
        ...

    def share(self, rank: int, n_ranks: int) -> FfnSpec:
        """What rank `rank` of several computes. Raises ConfigError where it cannot be divided."""
        ...


class LayerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One layer of a decoder."""

    mixer: MixerSpec
    ffn: FfnSpec
    norm: NormSpec
    """Of every norm around mixer and feed-forward."""
    placement: Placement = Placement.BEFORE
    residual_scale: float = 1.0
    """Factor on what mixer and feed-forward add to the residual stream."""

    @property
    def is_plain(self) -> bool:
        """RMS norms before mixer and feed-forward, nothing scaled: what products take in by themselves."""
        return (
            self.placement is Placement.BEFORE
            and self.norm.kind is NormKind.RMS
            and self.norm.weight
            and self.residual_scale == 1.0
        )
