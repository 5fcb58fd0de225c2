"""hf_overrides, generation_config, override_generation_config and download_dir reach what they are about."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import huggingface_hub
import pytest

from quire.compute.weights.hub import find_checkpoint
from quire.config.arch import ModelArch
from quire.config.engine import EngineConfig
from quire.config.generation import generation_defaults
from quire.config.model import merged, read_arch
from quire.core.errors import ConfigError

SHAPES = pathlib.Path(__file__).resolve().parents[3] / "quire/bench/shapes"


@pytest.fixture(scope="module")
def demo() -> pathlib.Path:
    return find_checkpoint("")


@pytest.fixture(scope="module")
def arch(demo: pathlib.Path) -> ModelArch:
    return read_arch(demo)


def test_overrides_are_merged() -> None:
    values = {"a": 1, "b": {"c": 1, "d": 2}, "e": 3}
    assert merged(values, {"a": 2, "b": {"d": 4}, "e": None, "f": 5}) == {"a": 2, "b": {"c": 1, "d": 4}, "f": 5}
    assert values["b"] == {"c": 1, "d": 2}


def test_hf_overrides_change_the_architecture(demo: pathlib.Path, arch: ModelArch) -> None:
    changed = read_arch(demo, {"rope_theta": 500000.0, "max_position_embeddings": 4096})
    assert (changed.ropes[0].theta, changed.max_position) == (500000.0, 4096)
    assert (arch.ropes[0].theta, arch.max_position) == (10000.0, 2048)
    with pytest.raises(ConfigError, match=r"config\.json with hf_overrides: hidden_act = 'geglu'"):
        read_arch(demo, {"hidden_act": "geglu"})


FALCON: dict[str, Any] = {
    "architectures": ["FalconForCausalLM"], "model_type": "falcon", "vocab_size": 256, "n_embed": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "new_decoder_architecture": True, "num_kv_heads": 2,
}  # fmt: skip


@pytest.mark.parametrize("overrides, message", [
    ({"rope_thetta": 5}, r"hf_overrides: rope_thetta = 5 changes nothing.* llama model; did you mean rope_theta\?"),
    ({"frobnication": {"a": 1}}, r"frobnication = \{'a': 1\} changes nothing: .* in this llama model$"),
    ({"rope_scaling": {"rope_type": "linear", "factr": 2}}, "factr = 2 must be absent"),
    ({"max_window_layers": 3}, "max_window_layers = 3 changes nothing"),
])  # fmt: skip
def test_an_override_that_nothing_reads_is_refused(demo: pathlib.Path, overrides: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_arch(demo, overrides)


def test_an_override_that_is_read_or_asks_for_nothing_is_taken(demo: pathlib.Path, arch: ModelArch) -> None:
    for nothing in ({"frobnication": None}, {"mlp_bias": False}, {"is_encoder_decoder": False}, {"use_cache": True}):
        assert read_arch(demo, nothing) == arch


def test_keys_are_those_of_the_family(tmp_path: pathlib.Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(FALCON))
    changed = read_arch(tmp_path, {"n_embed": 128, "ffn_hidden_size": 96, "rope_theta": 5e5})
    assert (changed.hidden_size, changed.layers[0].ffn.size, changed.ropes[0].theta) == (128, 96, 5e5)
    assert read_arch(tmp_path, {"bias": True}) != read_arch(tmp_path)
    with pytest.raises(ConfigError, match=r"intermediate_size = 96 .*; falcon has it as ffn_hidden_size"):
        read_arch(tmp_path, {"intermediate_size": 96})


def defaults(demo: pathlib.Path, arch: ModelArch, **options: Any) -> tuple[dict[str, float], tuple[int, ...]]:
    found = generation_defaults(EngineConfig(**options), demo, arch)
    return found.sampling, found.eos_token_ids


def test_the_source_of_default_sampling(demo: pathlib.Path, arch: ModelArch, tmp_path: pathlib.Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.25, "eos_token_id": [2, 7]}))
    assert defaults(demo, arch, generation_config="vllm") == ({}, (2,))
    assert defaults(demo, arch, generation_config=str(tmp_path)) == ({"temperature": 0.25}, (2, 7))
    assert defaults(tmp_path, arch) == ({"temperature": 0.25}, (2, 7))
    with pytest.raises(ConfigError, match=r"must be auto, vllm, or a folder with a generation_config.json"):
        defaults(demo, arch, generation_config=str(tmp_path / "nowhere"))


def test_overrides_of_default_sampling_win(arch: ModelArch, tmp_path: pathlib.Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.25, "top_k": 4}))
    given = {"temperature": 0.5, "top_p": 0.9, "top_k": None, "eos_token_id": 9}
    assert defaults(tmp_path, arch, override_generation_config=given) == ({"temperature": 0.5, "top_p": 0.9}, (9,))
    greedy = defaults(tmp_path, arch, override_generation_config={"do_sample": False})
    assert greedy == ({"temperature": 0.0, "top_k": 4}, (2,))


@pytest.mark.parametrize("given, message", [
    ({"temprature": 1}, "has 'temprature': it can have temperature, top_p"),
    ({"temperature": -1}, r"temperature = -1 is not allowed"),
    ({"eos_token_id": "x"}, "override_generation_config: eos_token_id"),
    ({"do_sample": 1}, "do_sample = 1 must be true or false"),
])  # fmt: skip
def test_a_wrong_override_is_refused(demo: pathlib.Path, arch: ModelArch, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        defaults(demo, arch, override_generation_config=given)


def test_models_of_the_hub_are_kept_in_download_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    asked: dict[str, Any] = {}

    def fake(name: str, **options: Any) -> str:
        asked.update(options, name=name)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)
    assert find_checkpoint("org/name", "main", str(tmp_path / "kept")) == tmp_path
    assert (asked["name"], asked["revision"], asked["cache_dir"]) == ("org/name", "main", tmp_path / "kept")
    find_checkpoint("org/name")
    assert asked["cache_dir"] is None


def test_only_absent_keys_that_a_message_speaks_of_are_told() -> None:
    """A default of another key has nothing to do with an id."""
    shape = SHAPES / "deepseek-v2-lite"
    with pytest.raises(ConfigError) as caught:
        read_arch(shape, {"vocab_size": 4096})
    assert caught.value.message.endswith(
        "eos_token_id = 100001 must be a token id below vocab_size = 4,096, or a list of at most 256 of them"
    )
    with pytest.raises(ConfigError) as caught:
        read_arch(shape, {"topk_method": "group_limited_greedy", "n_group": None, "topk_group": 2})
    said = "topk_group = 2 must be at most n_group = 1; absent keys count as their defaults: n_group (1)"
    assert caught.value.message.endswith(said)


@pytest.mark.parametrize(("shape", "given", "said"), [
    ("qwen3-30b-a3b", {"num_experts": None, "num_experts_per_tok": 200}, "an integer from 1 to 64"),
    ("qwen3-30b-a3b", {"num_experts": 4, "num_experts_per_tok": 8}, "= 8 must be an integer from 1 to num_experts = 4"),
    ("olmoe-1b-7b", {"num_experts": None, "num_local_experts": 4}, "an integer from 1 to num_local_experts = 4"),
    ("deepseek-v2-lite", {"n_routed_experts": None, "topk_method": "group_limited_greedy", "n_group": 65},
     "must be an integer from 1 to num_experts = 64; absent keys count as their defaults: num_experts (64)"),
    ("deepseek-v2-lite", {"first_k_dense_replace": 28}, "= 28 must be an integer from 0 to num_hidden_layers = 27"),
    ("mamba2-2.7b", {"n_groups": 81}, "n_groups = 81 must be an integer from 1 to num_heads = 80"),
])  # fmt: skip
def test_a_bound_that_is_another_keys_value_is_told_by_its_name(shape: str, given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_arch(SHAPES / shape, given)
    assert caught.value.message.endswith(said)


@pytest.mark.parametrize("shape, key, value", [
    ("lfm2-1.2b", "full_attn_idxs", [1]),
    ("gpt-oss-20b", "layer_types", ["full_attention"] * 2),
])  # fmt: skip
def test_what_goes_with_the_number_of_layers_is_said(shape: str, key: str, value: Any) -> None:
    said = f"; override {key}, too, as num_hidden_layers is overridden"
    with pytest.raises(ConfigError, match=rf"{key} = .* num_hidden_layers = 2.*{said}$"):
        read_arch(SHAPES / shape, {"num_hidden_layers": 2})
    assert read_arch(SHAPES / shape, {"num_hidden_layers": 2, key: value}).n_layers == 2
    with pytest.raises(ConfigError) as caught:
        read_arch(SHAPES / shape, {"num_hidden_layers": 2, key: "x"})
    assert said not in caught.value.message
    with pytest.raises(ConfigError) as caught:
        read_arch(SHAPES / shape, {"num_hidden_layers": 2, key: value, "num_attention_heads": 7})
    assert said not in caught.value.message
