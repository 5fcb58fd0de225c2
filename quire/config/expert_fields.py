"""Reading a model's config.json: the keys of mixtures of experts, and which layers have one.

Owns what such a key means. Does not own which keys a family has (`families`), nor their defaults.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from quire.config.arch import MAX_WIDTH
from quire.config.experts import ExpertsSpec, RoutingSpec, Scores, SharedExpert
from quire.config.layers import FfnSpec
from quire.config.model_fields import ModelFields

MAX_EXPERTS: Final = 4096
MAX_CHOSEN: Final = 64
EVEN: Final = "even_routing"
"""Key that no checkpoint has: with `hf_overrides` it puts the choice of every layer out of action (`Scores.EVEN`)."""
NAMES: Final = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Keys that have the number of experts; transformers takes one for another."""


def experts(
    config: ModelFields,
    *,
    n_experts: int,
    n_chosen: int,
    size: int | None = None,
    size_key: str = "moe_intermediate_size",
    scores: Scores = Scores.SOFTMAX,
    renormalise: bool | None = None,
    routing: dict[str, Any] | None = None,
    **more: Any,
) -> ExpertsSpec:
    """n_experts, n_chosen, size: defaults, size None for none. renormalise: None: as norm_topk_prob says, which is
    false where it is absent. routing: more fields of `RoutingSpec`; more: of `ExpertsSpec`. Raises ConfigError."""
    config.only("hidden_act", "silu")
    key = _experts_key(config)
    number = config.integer(key, 1, MAX_EXPERTS, n_experts)
    most, bound = (number, key) if number < MAX_CHOSEN else (MAX_CHOSEN, "")
    chosen = config.integer("num_experts_per_tok", 1, most, n_chosen, bound=bound)
    if renormalise is None:
        renormalise = config.flag("norm_topk_prob", False)
    said: dict[str, Any] = {"n_chosen": chosen, "scores": scores, "renormalise": renormalise} | (routing or {})
    if config.flag(EVEN, False):
        said = {"n_chosen": chosen, "scores": Scores.EVEN}
    return ExpertsSpec(
        n_experts=number, size=config.integer(size_key, 1, MAX_WIDTH, size), routing=RoutingSpec(**said), **more
    )


def _experts_key(config: ModelFields) -> str:
    return next((name for name in NAMES if name in config), NAMES[0])


def softmax_layers(config: ModelFields) -> list[FfnSpec]:
    """Feed-forwards of each layer of a DeepSeek-V2: softmax, and groups by their best expert if topk_method says so."""
    config.only("norm_topk_prob", False)
    config.only("scoring_func", "softmax")
    method = config.choice("topk_method", ("greedy", "group_limited_greedy"), "greedy")
    groups = (1, 1) if method == "group_limited_greedy" else None
    sparse = _grouped(config, groups=groups, n_experts=64, n_chosen=6, size=1407, renormalise=False)
    return _behind_dense(config, _with_shared(config, sparse, 2), 0)


def sigmoid_layers(
    config: ModelFields,
    *,
    n_experts: int = 256,
    size: int = 2048,
    groups: tuple[int, int] = (8, 4),
    n_dense: int = 3,
    scale: float = 2.5,
) -> list[FfnSpec]:
    """Feed-forwards of each layer of a DeepSeek-V3 or its kin, whose defaults these are: sigmoid, a correction for the
    choice, groups by their two best experts (DeepSeek-V3, arXiv 2412.19437, section 2.1.2)."""
    config.only("scoring_func", "sigmoid")
    config.only("topk_method", "noaux_tc")
    sparse = _grouped(
        config, groups=groups, n_best=2, scale=scale, n_experts=n_experts, n_chosen=8, size=size, scores=Scores.SIGMOID,
        renormalise=config.flag("norm_topk_prob", True), correction_bias=True,
    )  # fmt: skip
    return _behind_dense(config, _with_shared(config, sparse, 1), n_dense)


def _grouped(
    config: ModelFields, *, groups: tuple[int, int] | None, n_best: int = 1, scale: float = 1.0, **more: Any
) -> ExpertsSpec:
    """groups: defaults of n_group and topk_group; None: they are not read."""
    spec = experts(config, router_float32=True, **more)
    routing = msgspec.structs.replace(spec.routing, scale=config.scale("routed_scaling_factor", scale))
    if groups is not None:
        key = _experts_key(config)
        n_groups = config.integer("n_group", 1, spec.n_experts, groups[0], bound=key)
        if spec.n_experts % n_groups:
            raise config.error("n_group", f"a divisor of the {spec.n_experts} experts")
        chosen = config.integer("topk_group", 1, spec.n_experts, groups[1], bound=key)
        if chosen > n_groups:
            raise config.error("topk_group", f"at most n_group = {n_groups}")
        own = spec.n_experts // n_groups
        if routing.n_chosen > own * chosen:
            wanted = f"so many of n_group = {n_groups} groups of {own} experts that num_experts_per_tok ="
            raise config.error("topk_group", f"{wanted} {routing.n_chosen} can be chosen")
        routing = msgspec.structs.replace(routing, n_groups=n_groups, n_chosen_groups=chosen, n_group_best=n_best)
    return msgspec.structs.replace(spec, routing=routing)


def _with_shared(config: ModelFields, sparse: ExpertsSpec, default: int) -> ExpertsSpec:
    """With those of `n_shared_experts`, which are one that is so many times as wide."""
    number = config.integer("n_shared_experts", 0, MAX_CHOSEN, default)
    return msgspec.structs.replace(sparse, shared=SharedExpert(size=number * sparse.size) if number else None)


def _behind_dense(config: ModelFields, sparse: FfnSpec, default: int) -> list[FfnSpec]:
    """Of each layer: a dense feed-forward in the first `first_k_dense_replace`, then experts."""
    config.only("moe_layer_freq", 1)
    n_layers, key = config.n_layers, "first_k_dense_replace"
    n_dense = config.integer(key, 0, n_layers, min(default, n_layers), bound="num_hidden_layers")
    dense: list[FfnSpec] = [config.feed_forward()] * n_dense
    return dense + [sparse] * (n_layers - n_dense)


def every_step(config: ModelFields, sparse: FfnSpec) -> list[FfnSpec]:
    """Of each layer: experts in every `decoder_sparse_step`-th that is not in `mlp_only_layers`, else dense."""
    step = config.integer("decoder_sparse_step", 1, 1024, 1)
    only = config.values.get("mlp_only_layers") or []
    if not isinstance(only, list) or not all(type(layer) is int for layer in only):
        raise config.error("mlp_only_layers", "a list of numbers of layers")
    is_sparse = [(layer + 1) % step == 0 and layer not in only for layer in range(config.n_layers)]
    return [sparse if one else config.feed_forward() for one in is_sparse]
