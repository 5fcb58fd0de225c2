"""Reading a model's config.json: the keys of mixtures of experts, and which layers have one.

Owns what such a key means. Does not own which keys a family has (`families`), nor their defaults.
"""

from __future__ import annotations

from typing import Any, Final

from quire.config.arch import MAX_WIDTH
from quire.config.experts import ExpertsSpec, RoutingSpec, Scores, SharedExpert
from quire.config.layers import FfnSpec
from quire.config.model_fields import ModelFields

MAX_EXPERTS: Final = 4096
MAX_CHOSEN: Final = 64
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
    groups: bool = False,
    routing: dict[str, Any] | None = None,
    **more: Any,
) -> ExpertsSpec:
    """n_experts, n_chosen, size: defaults, size None for none. renormalise: None: as norm_topk_prob says, which is
    false where it is absent. groups: whether n_group, topk_group and routed_scaling_factor are read. routing: more
    fields of `RoutingSpec`; more: of `ExpertsSpec`. Raises ConfigError."""
    config.only("hidden_act", "silu")
    number = _n_experts(config, n_experts)
    chosen = config.integer("num_experts_per_tok", 1, min(MAX_CHOSEN, number), min(n_chosen, number))
    if renormalise is None:
        renormalise = config.flag("norm_topk_prob", False)
    said: dict[str, Any] = {"n_chosen": chosen, "scores": scores, "renormalise": renormalise} | (routing or {})
    if groups:
        said |= _groups(config, number, chosen)
        said["scale"] = config.scale("routed_scaling_factor")
    return ExpertsSpec(
        n_experts=number, size=config.integer(size_key, 1, MAX_WIDTH, size), routing=RoutingSpec(**said), **more
    )


def _n_experts(config: ModelFields, default: int) -> int:
    name = next((name for name in NAMES if name in config), NAMES[0])
    return config.integer(name, 1, MAX_EXPERTS, default)


def _groups(config: ModelFields, n_experts: int, n_chosen: int) -> dict[str, int]:
    n_groups = config.integer("n_group", 1, n_experts, 1)
    if n_experts % n_groups:
        raise config.error("n_group", f"a divisor of the {n_experts} experts")
    n_chosen_groups = config.integer("topk_group", 1, n_groups, 1)
    if n_chosen > n_experts // n_groups * n_chosen_groups:
        raise config.error(
            "topk_group", f"enough groups of {n_experts // n_groups} experts for num_experts_per_tok = {n_chosen}"
        )
    return {"n_groups": n_groups, "n_chosen_groups": n_chosen_groups}


def shared(config: ModelFields, expert_size: int, default: int = 1) -> SharedExpert | None:
    """Of `n_shared_experts`, which are one that is so many times as wide; None for 0."""
    number = config.integer("n_shared_experts", 0, MAX_CHOSEN, default)
    return SharedExpert(size=number * expert_size) if number else None


def behind_dense(config: ModelFields, sparse: FfnSpec, default: int) -> list[FfnSpec]:
    """Of each layer: a dense feed-forward in the first `first_k_dense_replace`, then experts."""
    n_dense = config.integer("first_k_dense_replace", 0, config.n_layers, min(default, config.n_layers))
    dense: list[FfnSpec] = [config.feed_forward()] * n_dense
    return dense + [sparse] * (config.n_layers - n_dense)


def every_step(config: ModelFields, sparse: FfnSpec) -> list[FfnSpec]:
    """Of each layer: experts in every `decoder_sparse_step`-th that is not in `mlp_only_layers`, else dense."""
    step = config.integer("decoder_sparse_step", 1, 1024, 1)
    only = config.values.get("mlp_only_layers") or []
    if not isinstance(only, list) or not all(type(layer) is int for layer in only):
        raise config.error("mlp_only_layers", "a list of numbers of layers")
    is_sparse = [(layer + 1) % step == 0 and layer not in only for layer in range(config.n_layers)]
    return [sparse if one else config.feed_forward() for one in is_sparse]
