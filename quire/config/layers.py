"""What a decoder layer is made of, as data: a token mixer, a feed-forward, norms, and where they stand.

Owns the vocabulary of descriptions and what each part stores. Does not own how a config.json says it (`families`), nor
how anything is computed. Invariant: a description holds plain values only, so it can be compared, printed and sent.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Protocol

import msgspec

from quire.config.rope import Rope

if TYPE_CHECKING:
    from quire.config.parameters import FfnParameters


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


class QKNorm(msgspec.Struct, frozen=True, kw_only=True):
    """A norm of queries and keys, before their rotation."""

    norm: NormSpec
    scope: QKNormScope = QKNormScope.HEAD


class KVSpec(msgspec.Struct, frozen=True):
    """What a token leaves behind in a layer, and how long that is needed."""

    n_kv_heads: int
    head_dim: int
    """A token leaves a key and a value of [n_kv_heads, head_dim]."""
    window: int = 0
    """w > 0: a token is seen by itself and by the w - 1 after it; 0: by all after it."""

    @property
    def numbers(self) -> int:
        """Numbers that a token leaves in one layer."""
        return 2 * self.n_kv_heads * self.head_dim


class AttentionSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Grouped-query attention."""

    n_heads: int
    n_kv_heads: int
    """Divides n_heads; head h of q reads head h // (n_heads / n_kv_heads) of k and v."""
    head_dim: int
    """Even; need not be hidden_size / n_heads."""
    scale: float
    """Factor on q·k."""
    rope: Rope | None
    """None: positions are not rotated in."""
    window: int = 0
    """w > 0 sees the last w tokens, itself included; 0 sees all."""
    soft_cap: float = 0.0
    """c > 0: logits become c * tanh(logit / c)."""
    alibi: float = 0.0
    """a > 0: logits fall with distance, by a times the slope of each head (Press et al. 2022)."""
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: QKNorm | None = None
    qkv_clip: float = 0.0
    """c > 0: queries, keys and values are cut to [-c, c], behind their norm."""
    first_head: int = 0
    """Number of the first of these heads in the whole model, of which a rank has a part (`config.shares`)."""
    n_heads_of_all: int = 0
    """Query heads of the whole model; 0: these are all."""

    @property
    def q_size(self) -> int:
        """Columns of all query heads."""
        return self.n_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Columns of all key heads (or value heads)."""
        return self.n_kv_heads * self.head_dim

    @property
    def kv_spec(self) -> KVSpec:
        """What it keeps."""
        return KVSpec(self.n_kv_heads, self.head_dim, self.window)


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

    mixer: AttentionSpec
    ffn: FfnSpec
    norm: NormSpec
    """Of every norm around mixer and feed-forward."""
    placement: Placement = Placement.BEFORE
    residual_scale: float = 1.0
    """Factor on what mixer and feed-forward add to the residual stream."""

    @property
    def is_plain(self) -> bool:
        """RMS norms before, a SiLU-gated feed-forward, nothing scaled: what products take in by themselves."""
        return (
            self.placement is Placement.BEFORE
            and self.norm.kind is NormKind.RMS
            and self.norm.weight
            and self.ffn.is_plain
            and self.residual_scale == 1.0
        )
