"""A feed-forward of experts, as data: how many there are, which of them a token goes through, and what one computes.

Owns the vocabulary of routing and of experts, and what they store. Does not own how any of it is computed
(`kernels/moe`, `compute/layers/experts`), nor how checkpoints hold it. Torch-free.
Invariant: `n_chosen` distinct experts are chosen for each token, out of the groups chosen.
"""

from __future__ import annotations

import enum
from typing import Final

import msgspec

from quire.config.feed_forward import FeedForwardSpec
from quire.config.parameters import Cut, FfnParameters, Kept, Matrix, Tensor
from quire.config.shares import part_of

CORRECTION: Final = "e_score_correction_bias"
"""What the name of the correction of scores ends in."""


@enum.unique
class Scores(enum.Enum):
    """What the logits [E] of a token become: both what is chosen by and what weighs."""

    SOFTMAX = "softmax"
    """Over all experts. Renormalised, the weights are the softmax over the chosen ones alone (Mixtral, gpt-oss)."""
    SIGMOID = "sigmoid"
    """Each for itself (DeepSeek-V3, section 2.1.2)."""
    SPARSE_MIXER = "sparse_mixer"
    """The logits choose, one expert after another; each weighs what a softmax over those not yet chosen gives it, where
    those far below it count nothing (`mixer_margin`; Liu et al. 2024, arXiv:2409.12136; Phi-3.5)."""
    EVEN = "even"
    """No scores: row after row takes the next experts, and all weigh the same. For measurements with random weights."""


class Gating(msgspec.Struct, frozen=True, kw_only=True):
    """Between the matrices of an expert: (u + offset) * g * sigmoid(slope * g), g the gate's output and u the up's.

    As it is by default it is SwiGLU: silu(g) * u.
    """

    slope: float = 1.0
    offset: float = 0.0
    limit: float = 0.0
    """c > 0: before all else g is cut to at most c, and u to [-c, c] (gpt-oss)."""


class RoutingSpec(msgspec.Struct, frozen=True, kw_only=True):
    """From logits to the chosen experts and their weights."""

    n_chosen: int
    """k, of each token."""
    scores: Scores = Scores.SOFTMAX
    renormalise: bool = False
    """Weights of the chosen are divided by their sum."""
    scale: float = 1.0
    """Factor on the weights, at last."""
    n_groups: int = 1
    """Experts are divided into as many groups of neighbours."""
    n_chosen_groups: int = 1
    """Only experts of the best groups can be chosen; n_groups: of all."""
    n_group_best: int = 1
    """A group is as good as the sum of its best scores, of so many of them (1: DeepSeek-V2, 2: V3)."""
    mixer_margin: float = 0.0
    """m: with SPARSE_MIXER, s counts nothing beside the best score b where (b - s) / max(|s|, b) > m."""


class SharedExpert(msgspec.Struct, frozen=True, kw_only=True):
    """A feed-forward that every token goes through beside its experts. Gated, with `Gating` as by default."""

    size: int
    gated: bool = False
    """What it gives is times sigmoid(gate · x), gate being a vector."""


class ExpertsSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A feed-forward that is the sum over the chosen experts e of w_e * down_e(gating(gate_e(x), up_e(x))). See
    `FfnSpec`. Several ranks divide the inner vector of every expert, or the experts."""

    n_experts: int
    size: int
    """Of one expert's inner vector."""
    routing: RoutingSpec
    gating: Gating = Gating()
    bias: bool = False
    """Of the matrices of experts."""
    router_bias: bool = False
    """Part of the logits."""
    correction_bias: bool = False
    """A float32 number for each expert, added to its score for the choice, not for the weight."""
    router_float32: bool = False
    """Logits are computed in float32, not in the model's dtype."""
    shared: SharedExpert | None = None
    are_apart: bool = False
    """Each rank has whole experts, as many as every other; what all tokens go through is divided in any case."""
    n_redundant: int | None = None
    """Copies beyond one of each expert. They have slots behind the others, in which experts come in turn again, until
    they are rearranged. None: experts stay where they are."""
    block: tuple[int, int] = (0, 1)
    """(number, of how many): then only this part of the slots is for the ranks to divide. Data-parallel ranks have
    one each, and send one another the rows for it."""
    first: int = 0
    n_held: int = 0
    """Of a rank: slots from `first` on; 0: one of each expert."""

    @property
    def n_slots(self) -> int:
        """Experts and copies of them, in all ranks together."""
        return self.n_experts + (self.n_redundant or 0)

    @property
    def held(self) -> list[int]:
        """The experts whose matrices are there, as they are loaded; the router knows all."""
        slots = range(self.first, self.first + (self.n_held or self.n_experts))
        return [slot % self.n_experts for slot in slots]

    @property
    def of_block(self) -> range:
        """The slots that the ranks are to divide."""
        number, n_blocks = self.block
        n_each = self._part(n_blocks)
        return range(number * n_each, (number + 1) * n_each)

    def _part(self, n_ranks: int) -> int:
        """Slots of one of them."""
        copies = f" and {self.n_redundant} copies" if self.n_redundant else ""
        cure = "leave --enable-expert-parallel out, or take another number of ranks"
        return part_of(f"there are {self.n_experts} experts{copies}", self.n_slots, n_ranks, cure=cure)

    @property
    def is_plain(self) -> bool:
        """See `FfnSpec`."""
        return False

    @property
    def words(self) -> str:
        """See `FfnSpec`."""
        routing = self.routing
        found = [f"{routing.n_chosen} of {self.n_experts} experts, {self.size:,} wide"]
        found += [f"chosen by {routing.scores.value.replace('_', ' ')}" + ", renormalised" * routing.renormalise]
        found += ["with a correction"] if self.correction_bias else []
        if routing.n_groups > 1:
            found.append(f"out of {routing.n_chosen_groups} of {routing.n_groups} groups")
        found += [f"weights times {routing.scale:g}"] if routing.scale != 1.0 else []
        found += [f"cut at {self.gating.limit:g}"] if self.gating.limit else []
        found += ["bias"] if self.bias else []
        if self.shared is not None:
            found.append(f"{'a gated' if self.shared.gated else 'a'} shared one, {self.shared.size:,} wide")
        return ", ".join(found)

    def n_row_numbers(self, hidden_size: int) -> int:
        """See `FfnSpec`: the normed input, logits and scores in float32, inner vectors and outputs of the experts."""
        shared = 0 if self.shared is None else 3 * self.shared.size
        return hidden_size + 4 * self.n_experts + self.routing.n_chosen * (self.size + hidden_size + 6) + shared

    def n_idle_weights(self, hidden_size: int, n_tokens: int) -> float:
        """See `FfnSpec`."""
        share = self.routing.n_chosen / self.n_experts
        unread = max(0.0, 1 - n_tokens * share) if self.routing.scores is Scores.EVEN else (1 - share) ** n_tokens
        return unread * len(self.held) * 3 * self.size * hidden_size

    def parameters(self, at: str, hidden_size: int) -> FfnParameters:
        """See `FfnSpec`: 'router', 'up.0', 'down.0' and so on, 'shared_up', 'shared_down' and 'shared_gate'."""
        router = Matrix(
            n_in=hidden_size, parts=((at + "mlp.gate", self.n_experts),), bias=self.router_bias,
            kept=Kept.FLOAT32 if self.router_float32 else Kept.FLOATING,
        )  # fmt: skip
        matrices = {"router": router}
        one, of_block = FeedForwardSpec(size=self.size, bias=self.bias), self.of_block
        for expert in self.held:
            for place, matrix in one.matrices(f"{at}mlp.experts.{expert}.", hidden_size).items():
                numbers = tuple(slot - of_block.start for slot in range(expert, self.n_slots, self.n_experts))
                apart = {"cut": Cut.EXPERT, "turns": (numbers, len(of_block))} if self.are_apart else {}
                bank = f"{at}mlp.experts.{place}"
                matrices[f"{place}.{expert}"] = msgspec.structs.replace(matrix, bank=bank, **apart)
        if self.shared is not None:
            shared = FeedForwardSpec(size=self.shared.size).matrices(at + "mlp.shared_expert.", hidden_size)
            matrices |= {f"shared_{place}": matrix for place, matrix in shared.items()}
            if self.shared.gated:
                gate = ((at + "mlp.shared_expert_gate", 1),)
                matrices["shared_gate"] = Matrix(n_in=hidden_size, parts=gate, kept=Kept.FLOATING)
        correction = Tensor(name=at + "mlp.gate", shape=(self.n_experts,), kind=CORRECTION, is_float32=True)
        return FfnParameters(matrices=matrices, tensors={"correction": correction} if self.correction_bias else {})

    def share(self, rank: int, n_ranks: int) -> ExpertsSpec:
        """See `FfnSpec`."""
        shared = self.shared
        if shared is not None:
            own = part_of(f"the shared expert is {shared.size} wide", shared.size, n_ranks)
            shared = msgspec.structs.replace(shared, size=own)
        if self.are_apart:
            of_block = self.of_block
            n_held = self._part(n_ranks * self.block[1])
            if n_ranks * self.block[1] == 1:
                return self
            return msgspec.structs.replace(self, first=of_block.start + rank * n_held, n_held=n_held, shared=shared)
        size = part_of(f"an expert is {self.size} wide", self.size, n_ranks)
        return msgspec.structs.replace(self, size=size, shared=shared)
