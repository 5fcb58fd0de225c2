"""What a layer keeps of each token for its backward pass, with and without checkpointing, as tensors that are counted.

Korthikanti et al. 2022, arXiv 2205.05198, section 4: of a GPT layer sbh (34 + 5 as/h) bytes, of which 10 sbh are not
divided by tensor parallelism alone; without scores 34 sbh; the input alone 2 sbh. The same count is made here tensor by
tensor, for grouped heads, gates and experts: see `kept_by_layer`. Activations have two bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import msgspec

from quire.config.arch import ModelArch
from quire.config.attention import AttentionSpec
from quire.config.experts import ExpertsSpec
from quire.config.feed_forward import FeedForwardSpec
from quire.config.latent import LatentAttentionSpec
from quire.config.layers import LayerSpec, Placement
from quire.config.parameters import layer_parameters
from quire.config.stages import stage_layers
from quire.planner.training.setup import Checkpointing, TrainingSetup

ACTIVATION_BYTES: Final = 2
MASK_BYTES: Final = 1
"""A number of a dropout mask."""
FLOAT32_BYTES: Final = 4


class Kept(msgspec.Struct, frozen=True):
    """Bytes of a token in one layer, or in several."""

    whole: float = 0.0
    """Of the residual stream's width: every tensor-parallel device has them, unless the sequence is divided."""
    divided: float = 0.0
    """Of heads and inner vectors, which tensor-parallel devices divide."""
    scores: float = 0.0
    """Of these, what grows with the sequence, or stands for it; recomputed by selective checkpointing."""

    def on_device(self, setup: TrainingSetup, *, with_scores: bool = True) -> float:
        """Bytes of a token on one device (equations 2 to 5 there)."""
        n = setup.tensor_parallel
        whole = self.whole / (n if setup.sequence_parallel else 1)
        return whole + self.divided / n - (0.0 if with_scores else self.scores / n)


def kept_by_layer(spec: LayerSpec, hidden_size: int, setup: TrainingSetup) -> Kept:
    """What a layer keeps of a token where nothing is recomputed.

    Norms keep their inputs, products theirs, attention q, k, v and its result, and either its scores (a softmax of
    [heads, seq_len], and with dropout a mask and another) or one logsumexp a head. A gated feed-forward keeps gate, up
    and their product; each chosen expert its input, these three and its output.
    """
    parameters = layer_parameters(spec, hidden_size, 0)
    around = (
        parameters.attention_norm, parameters.attention_post_norm, parameters.ffn_norm, parameters.ffn_post_norm,
    )  # fmt: skip
    n_parts = 2 if parameters.ffn.matrices else 1
    n_inputs = 1 if spec.placement is Placement.SHARED else n_parts
    n_wide = sum(norm is not None for norm in around) + n_inputs
    whole = ACTIVATION_BYTES * hidden_size * n_wide + MASK_BYTES * hidden_size * n_parts * setup.dropout
    scores = _scores(spec.mixer, setup)
    divided = ACTIVATION_BYTES * (_mixer_numbers(spec.mixer) + _ffn_numbers(spec.ffn, hidden_size))
    return Kept(whole, divided + scores, scores)


def _scores(mixer: Any, setup: TrainingSetup) -> float:
    if mixer.kv_spec is None:
        return 0.0
    if not setup.stores_scores:
        return float(FLOAT32_BYTES * mixer.n_heads)
    each = 2 * ACTIVATION_BYTES + MASK_BYTES if setup.dropout else ACTIVATION_BYTES
    return float(each * mixer.n_heads * setup.seq_len)


def _attention(mixer: AttentionSpec) -> int:
    """q, k, v, the result; queries and keys before their norm."""
    kept = 2 * mixer.q_size + 2 * mixer.kv_size
    return kept + (mixer.q_size + mixer.kv_size if mixer.qk_norm is not None else 0)


def _latent(mixer: LatentAttentionSpec) -> int:
    """What queries, keys and values are made of, before and after their norms; then all three as heads, and the result:
    training does not take them through the line."""
    ranks = 2 * mixer.q_lora_rank + 2 * mixer.kv_lora_rank + mixer.qk_rope_head_dim
    return ranks + mixer.n_heads * (2 * mixer.qk_head_dim + 2 * mixer.v_head_dim)


MIXERS: Final[dict[type, Callable[[Any], int]]] = {AttentionSpec: _attention, LatentAttentionSpec: _latent}
"""Kind of mixer → numbers that it keeps of a token. Of another kind: all that are there at once while it is computed,
an estimate."""


def _mixer_numbers(mixer: Any) -> int:
    count = MIXERS.get(type(mixer))
    return int(mixer.n_row_numbers) if count is None else count(mixer)


def _ffn_numbers(ffn: Any, hidden_size: int) -> int:
    if isinstance(ffn, FeedForwardSpec):
        return (3 if ffn.gated else 2) * ffn.size
    if isinstance(ffn, ExpertsSpec):
        shared = 3 * ffn.shared.size if ffn.shared is not None else 0
        probabilities = 2 * FLOAT32_BYTES // ACTIVATION_BYTES * ffn.n_experts
        return ffn.routing.n_chosen * (3 * ffn.size + 2 * hidden_size) + probabilities + shared
    return int(ffn.n_row_numbers(hidden_size))


def is_estimate(arch: ModelArch) -> bool:
    """Whether a mixer's numbers are not counted tensor by tensor."""
    return any(type(layer.mixer) not in MIXERS for layer in arch.layers)


class StageActivations(msgspec.Struct, frozen=True):
    """Bytes of one device of a pipeline stage at its fullest."""

    layers: float
    """Kept of all micro-batches in flight."""
    ends: float
    """Of the embedding's dropout, the last norm, the head and float32 logits."""
    working: float
    """Beside these for a while: the layer that is recomputed, or the gradient of the logits."""


def stage_activations(arch: ModelArch, setup: TrainingSetup) -> list[StageActivations]:
    """Of each stage. Stage i of p has p - i micro-batches in flight (1F1B, Narayanan et al. 2021, section 2.2.1)."""
    n_stages, n_tokens = setup.pipeline_parallel, setup.micro_tokens
    kept = functools.lru_cache(maxsize=64)(lambda spec: kept_by_layer(spec, arch.hidden_size, setup))
    border = Kept(whole=float(ACTIVATION_BYTES * arch.hidden_size)).on_device(setup)
    found = []
    for stage, layers in enumerate(stage_layers(arch.n_layers, n_stages)):
        n_flying = min(setup.n_micro_batches, n_stages - stage)
        each = [kept(arch.layers[i]) for i in layers]
        if setup.checkpointing is Checkpointing.FULL:
            of_layers, again = border * len(each), max((one.on_device(setup) for one in each), default=0.0)
        else:
            with_scores = setup.checkpointing is Checkpointing.NONE
            of_layers = sum(one.on_device(setup, with_scores=with_scores) for one in each)
            again = 0.0 if with_scores else max((one.scores for one in each), default=0.0) / setup.tensor_parallel
        first, last = _ends(arch, setup) if stage in (0, n_stages - 1) else (Kept(), Kept())
        ends = first.on_device(setup) * n_flying * (stage == 0) + last.on_device(setup) * (stage == n_stages - 1)
        gradient = FLOAT32_BYTES * arch.vocab_size / setup.tensor_parallel if stage == n_stages - 1 else 0.0
        found.append(
            StageActivations(of_layers * n_flying * n_tokens, ends * n_tokens, max(again, gradient) * n_tokens)
        )
    return found


def _ends(arch: ModelArch, setup: TrainingSetup) -> tuple[Kept, Kept]:
    """Of the embedding, and of the head: section 4.3 there, sbh and 4sbh (1 + v/h)."""
    mask = float(MASK_BYTES * arch.hidden_size * setup.dropout)
    logits = float(FLOAT32_BYTES * arch.vocab_size)
    return Kept(whole=mask), Kept(whole=2.0 * ACTIVATION_BYTES * arch.hidden_size, divided=logits)
