"""How a model is divided among devices: the degrees of each kind of parallelism, and what one rank has.

Owns the degrees and their checks. Does not own the arithmetic of cuts (`config/shares`) nor traffic (`communication`).
Invariant: the ranks of a mesh are tp * pp * sp * ring * dp; ep divides experts among the ranks of a stage.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import msgspec

from quire.config.arch import ModelArch
from quire.config.layers import LayerSpec
from quire.config.shares import share_layer
from quire.core.errors import ConfigError
from quire.planner.context import LEAST_ROWS


class Mesh(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """Degrees; 1: not divided so."""

    tp: int = 1
    """Every matrix is divided (Shoeybi et al. 2019, "Megatron-LM")."""
    pp: int = 1
    """Layers are divided into stages (Huang et al. 2019, "GPipe")."""
    dp: int = 1
    """Replicas, each with its own requests."""
    ep: int = 1
    """Whole experts are divided (Lepikhin et al. 2021, "GShard"); 1: inner vectors of experts are, by tp."""
    sp: int = 1
    """Tokens of a prompt are divided, and heads of attention (Jacobs et al. 2023, "DeepSpeed Ulysses"); weights are
    not."""
    ring: int = 1
    """Tokens of all sequences are divided, in turn (Liu et al. 2023, "Ring attention"); weights are not."""

    @property
    def n_devices(self) -> int:
        """Ranks in all."""
        return self.tp * self.pp * self.n_token_ranks * self.dp

    @property
    def n_token_ranks(self) -> int:
        """Ranks among which the rows of long steps are divided."""
        return self.sp * self.ring

    def own_rows(self, n_rows: float) -> float:
        """Of a step, those of one rank."""
        return n_rows if n_rows < LEAST_ROWS["cuda"] else n_rows / self.n_token_ranks

    @property
    def n_attention(self) -> int:
        """Ranks among which keys and values of a layer are divided, where there are as many heads."""
        return self.tp * self.n_token_ranks

    @property
    def sends_rows(self) -> bool:
        """Whether rows travel to their experts. Where experts are divided among the ranks of `tp`, these have the same
        rows already, and their sum is an all-reduce."""
        return self.ep > 1 and self.ep != self.tp

    @property
    def words(self) -> str:
        """`tp4 pp2`; 'one device' for one."""
        names = ("tp", "pp", "dp", "ep", "sp", "ring")
        found = [f"{name}{getattr(self, name)}" for name in names if getattr(self, name) > 1]
        return " ".join(found) or "one device"

    def refusal(self, arch: ModelArch) -> str:
        """Why the model cannot be divided so; empty: it can."""
        if self.pp > arch.n_layers:
            return f"{self.pp} stages of {arch.n_layers} layers"
        if self.ep > 1:
            n_experts = [n for n in map(n_experts_of, dict.fromkeys(arch.layers)) if n]
            if not n_experts:
                return f"ep = {self.ep}: the model has no experts"
            if any(n % self.ep for n in n_experts):
                return f"{n_experts[0]} experts among {self.ep} ranks"
            n_in_stage = self.tp * self.n_token_ranks * self.dp
            if n_in_stage % self.ep:
                return f"ep = {self.ep} does not divide the {n_in_stage} ranks of a stage"
        if self.n_token_ranks > 1 and any(spec.mixer.state_spec is not None for spec in arch.layers):
            return f"sp = {self.sp}, ring = {self.ring}: the tokens of recurrent layers follow each other"
        try:
            for spec in dict.fromkeys(arch.layers):
                rank_layer(spec, self.tp)
                if self.sp > 1 and arch.n_heads % (self.tp * self.sp):
                    return f"{arch.n_heads} heads among {self.tp * self.sp} ranks"
        except ConfigError as error:
            return error.message
        return ""


@functools.lru_cache(maxsize=1024)
def rank_layer(spec: LayerSpec, tp: int) -> LayerSpec:
    """What the first rank of `tp` computes of a layer. ConfigError where it cannot be divided."""
    return spec if tp == 1 else share_layer(spec, 0, tp)


def n_experts_of(spec: LayerSpec) -> int:
    """Experts of a layer; 0: it has none."""
    return int(getattr(spec.ffn, "n_experts", 0))


def divisors(n: int) -> list[int]:
    """Rising."""
    return [d for d in range(1, n + 1) if n % d == 0]


def meshes(n_devices: int, *, experts: bool, sequences: bool) -> Iterator[Mesh]:
    """All that use exactly so many devices; experts, sequences: with those kinds of parallelism."""
    for tp in divisors(n_devices):
        for pp in divisors(n_devices // tp):
            for sp in divisors(n_devices // (tp * pp)) if sequences else [1]:
                dp = n_devices // (tp * pp * sp)
                for ep in divisors(tp * sp * dp) if experts else [1]:
                    yield Mesh(tp=tp, pp=pp, dp=dp, ep=ep, sp=sp)
