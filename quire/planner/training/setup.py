"""How a model is trained, as data: devices and how the model is divided over them, batch, precision, what is kept.

Owns the choices and what is refused of them. Does not own what follows from them (`plan`).
"""

from __future__ import annotations

import enum
from typing import Final

import msgspec

from quire.core.errors import ConfigError


@enum.unique
class Checkpointing(enum.Enum):
    """What of the forward pass is computed again in the backward pass (Korthikanti et al. 2022, section 4)."""

    NONE = "none"
    SELECTIVE = "selective"
    """The scores of attention: softmax, dropout, and what they multiply."""
    FULL = "full"
    """Everything between the borders of layers."""


class Optimizer(msgspec.Struct, frozen=True):
    """What it keeps of a parameter, master weights left out."""

    state_bytes: float
    words: str


BLOCK: Final = 2048
"""Numbers of a state in 8 bits that share a scale (Dettmers et al. 2022, arXiv 2110.02861, section 2.1)."""
OPTIMIZERS: Final = {
    "adam": Optimizer(8, "two moments in float32"),
    "adam-bf16": Optimizer(4, "two moments in bfloat16"),
    "adam-8bit": Optimizer(2 + 2 * 4 / BLOCK, "two moments in 8 bits, a scale for each 2,048"),
    "sgd": Optimizer(4, "one momentum in float32"),
}
"""Name → its state. What is not here can be said by its bytes: 8 for Adam."""


class TrainingSetup(msgspec.Struct, frozen=True, kw_only=True):
    """All choices. ConfigError on creation for those that exclude each other."""

    n_devices: int = 8
    batch_tokens: float = 4e6
    """Of a step of the optimizer; rounded to whole micro-batches on every replica."""
    seq_len: int = 4096
    micro_batch: int = 1
    """Sequences that a replica computes at once."""
    zero: int = 1
    """What data-parallel replicas share out (Rajbhandari et al. 2020): 0 nothing, 1 optimizer states, 2 gradients too,
    3 weights too."""
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    sequence_parallel: bool = True
    """Tensor-parallel devices divide also what is between their products (Korthikanti et al. 2022, section 4.2.2)."""
    checkpointing: Checkpointing = Checkpointing.FULL
    optimizer: str = "adam"
    gradient_bytes: int = 2
    master_bytes: int = 4
    """A copy of the weights that the optimizer changes: 4, or 0 where it changes the weights themselves."""
    stores_scores: bool = False
    """Attention keeps its scores for the backward pass, as it did before FlashAttention (Dao et al. 2022)."""
    dropout: bool = False
    """After attention's softmax, after each part of a layer, and after the embedding."""

    def __post_init__(self) -> None:
        model = self.tensor_parallel * self.pipeline_parallel
        if self.n_devices % model:
            raise ConfigError(
                f"{self.n_devices} devices cannot be divided into replicas of {self.tensor_parallel} tensor-parallel x "
                f"{self.pipeline_parallel} pipeline stages = {model}: take a multiple of {model}"
            )
        if self.optimizer not in OPTIMIZERS:
            raise ConfigError(f"the optimizer {self.optimizer!r} is unknown: choose one of {', '.join(OPTIMIZERS)}")

    @property
    def n_replicas(self) -> int:
        """Of the model: data parallelism."""
        return self.n_devices // (self.tensor_parallel * self.pipeline_parallel)

    @property
    def n_micro_batches(self) -> int:
        """Of a replica in a step."""
        return max(1, round(self.batch_tokens / (self.micro_tokens * self.n_replicas)))

    @property
    def micro_tokens(self) -> int:
        """Of a micro-batch."""
        return self.micro_batch * self.seq_len

    @property
    def step_tokens(self) -> int:
        """Of all replicas in a step, as they are."""
        return self.n_micro_batches * self.micro_tokens * self.n_replicas

    @property
    def bubble(self) -> float:
        """Part of a step that stages wait: (p - 1) / (m + p - 1) (Narayanan et al. 2021, section 2.2.1, as a part of
        the whole)."""
        return (self.pipeline_parallel - 1) / (self.n_micro_batches + self.pipeline_parallel - 1)
