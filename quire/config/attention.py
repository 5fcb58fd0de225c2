"""Grouped-query attention as a token mixer: what it is, what it stores, and its part on one of several ranks.

Owns its description. Does not own what is computed (`compute/layers/attention`). Torch-free.
"""

from __future__ import annotations

from typing import Final

import msgspec

from quire.config.layers import KVSpec, NormKind, QKNorm, QKNormScope, Rotated
from quire.config.parameters import Cut, Matrix, MixerParameters, NormTable, Tensor
from quire.config.rope import Rope
from quire.config.shares import part_of, times_of
from quire.core.errors import ConfigError

SCOPES: Final = {
    QKNormScope.HEAD: "each head with the same weights",
    QKNormScope.HEADS: "each head with its own weights",
    QKNormScope.APART: "each head with its own weights",
    QKNormScope.ALL: "all heads together",
}


class AttentionSpec(msgspec.Struct, frozen=True, kw_only=True):
    """See `MixerSpec` for what all mixers say."""

    n_heads: int
    n_kv_heads: int
    """Divides n_heads; head h of q reads head h // (n_heads / n_kv_heads) of k and v."""
    head_dim: int
    """Even; need not be hidden_size / n_heads."""
    scale: float
    """Factor on q·k."""
    rope: Rope | None
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
    """c > 0: queries, keys and values are cut to [-c, c], behind their norms."""
    sinks: bool = False
    """Each head has one more logit, which has no value (gpt-oss)."""
    first_head: int = 0
    """Number of the first of these heads in the whole model, of which a rank has a part."""
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
        return KVSpec(self.n_kv_heads, self.head_dim, self.window)

    @property
    def state_spec(self) -> None:
        return None

    @property
    def rope_head_dim(self) -> int:
        return self.head_dim

    @property
    def n_row_numbers(self) -> int:
        """q, k, v and what attention gives."""
        return 2 * self.q_size + 2 * self.kv_size

    @property
    def n_pair_flops(self) -> int:
        return 4 * self.q_size

    def spared_flops(self, n_rows: int, n_keys: int) -> int:
        """None: there is one way."""
        return 0

    @property
    def words(self) -> str:
        found = [f"{self.n_heads} heads of {self.head_dim}", f"{self.n_kv_heads} of keys and values"]
        found += [f"window of {self.window:,} tokens" if self.window else "no window", f"scale {self.scale:.6g}"]
        biases = [name for name, there in (("q, k, v", self.qkv_bias), ("output", self.o_bias)) if there]
        found += [f"bias on {' and '.join(biases)}"] if biases else []
        if self.qk_norm is not None:
            found.append(f"q and k normed ({self.qk_norm.norm.words}, {SCOPES[self.qk_norm.scope]})")
        found += [f"soft cap {self.soft_cap:g}"] if self.soft_cap else []
        found += [f"q, k, v cut to ±{self.qkv_clip:g}"] if self.qkv_clip else []
        found += ["a sink in each head"] if self.sinks else []
        return ", ".join(found)

    @property
    def position_words(self) -> tuple[str, ...]:
        rope = () if self.rope is None else (self.rope.words(self.head_dim),)
        return (*rope, f"ALiBi, slopes times {self.alibi:g}") if self.alibi else rope

    def parameters(self, at: str, hidden_size: int) -> MixerParameters:
        """Projections 'qkv' and 'out', norms 'q' and 'k', 'sinks'."""
        rows = (("q", self.q_size), ("k", self.kv_size), ("v", self.kv_size))
        norms = {} if self.qk_norm is None else {which: self._norm(self.qk_norm, at, which) for which in ("q", "k")}
        return MixerParameters(
            matrices={
                "qkv": Matrix(
                    n_in=hidden_size, parts=tuple((f"{at}self_attn.{which}_proj", n) for which, n in rows),
                    bias=self.qkv_bias, whole=at + "self_attn.qkv_proj", cut=Cut.COLUMN, unit=self.head_dim,
                    n_repeated=2,
                ),
                "out": Matrix(
                    n_in=self.q_size, parts=((at + "self_attn.o_proj", hidden_size),), bias=self.o_bias, cut=Cut.ROW,
                    unit=self.head_dim,
                ),
            },
            norms=norms,
            tensors={"sinks": self._sinks(at)} if self.sinks else {},
        )  # fmt: skip

    def _sinks(self, at: str) -> Tensor:
        return Tensor(name=at + "self_attn", shape=(self.n_heads,), kind="sinks", is_float32=True)

    def _norm(self, norm: QKNorm, at: str, which: str) -> NormTable:
        n_heads = self.n_heads if which == "q" else self.n_kv_heads
        shapes = {
            QKNormScope.HEAD: (self.head_dim,),
            QKNormScope.HEADS: (n_heads, self.head_dim),
            QKNormScope.APART: (n_heads, self.head_dim),
            QKNormScope.ALL: (n_heads * self.head_dim,),
        }
        shape, is_all = shapes[norm.scope], norm.scope is QKNormScope.ALL
        return NormTable(
            name=f"{at}self_attn.{which}_norm", shape=shape, spec=norm.norm,
            is_apart=norm.scope is QKNormScope.APART,
            cut=Cut.COLUMN if is_all or len(shape) == 2 else Cut.REPLICATED,
            is_repeated=which == "k", unit=self.head_dim if is_all else 1,
        )  # fmt: skip

    def rotated(self, name: str) -> Rotated | None:
        """Of q_proj, k_proj, q_norm and k_norm."""
        which, _, kind = name.partition("_")
        n_heads = {"q": self.n_heads, "k": self.n_kv_heads}.get(which, 0)
        if kind == "norm" and self.qk_norm is not None:
            n_heads = 1 if self.qk_norm.scope in (QKNormScope.HEAD, QKNormScope.APART) else n_heads
        elif kind != "proj":
            n_heads = 0
        if self.rope is None or not n_heads:
            return None
        return Rotated(n_heads, 0, self.rope.rotary_dim(self.head_dim))

    def grouped(self, name: str) -> tuple[int, ...]:
        """Of qkv_proj."""
        return self.n_heads // self.n_kv_heads * self.head_dim, self.head_dim, self.head_dim

    def share(self, rank: int, n_ranks: int) -> AttentionSpec:
        norm = self.qk_norm
        if norm is not None and norm.scope is QKNormScope.ALL and norm.norm.kind is not NormKind.RMS:
            raise ConfigError(
                f"this model norms the queries of all {self.n_heads} heads as one vector, of which each of {n_ranks} "
                "ranks has a part",
                cure="take one rank",
            )
        n_heads = part_of(f"attention has {self.n_heads} query heads", self.n_heads, n_ranks)
        n_times = times_of(self.n_kv_heads, n_ranks, True)
        n_kv_heads = part_of(f"attention has {self.n_kv_heads} KV heads", self.n_kv_heads, n_ranks // n_times)
        return msgspec.structs.replace(
            self, n_heads=n_heads, n_kv_heads=n_kv_heads, first_head=rank * n_heads, n_heads_of_all=self.n_heads
        )
