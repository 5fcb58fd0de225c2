"""config.json of each family, old and new spelling, and every absurd value refused by field, value and limit."""

from __future__ import annotations

import json
import logging
import os
import pathlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.config.arch import ModelArch
from quire.config.families import FAMILIES
from quire.config.generation import read_generation
from quire.config.model import merged, parse_arch, read_arch
from quire.core.errors import ConfigError

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
QWEN2 = {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "num_key_value_heads": 4}
QWEN3 = {**LLAMA, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_key_value_heads": 4}
MISTRAL = {**LLAMA, "architectures": ["MistralForCausalLM"], "model_type": "mistral", "num_key_value_heads": 2}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def refused(config: dict[str, Any], *parts: str, param: str | None = None) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_arch(config)
    for part in parts:
        assert part in caught.value.message, caught.value.message
    assert len(caught.value.message) < 2000
    if param is not None:
        assert caught.value.param == param


def test_llama() -> None:
    arch = parse_arch({**LLAMA, "num_key_value_heads": 2, "tie_word_embeddings": True, "eos_token_id": [2, 5]})
    assert (arch.family, arch.n_layers, arch.n_heads, arch.n_kv_heads, arch.head_dim) == ("llama", 3, 4, 2, 16)
    mixer = arch.layers[0].mixer
    assert (mixer.q_size, mixer.kv_size, mixer.scale) == (64, 32, 0.25)
    assert (arch.norm.eps, arch.dtype, arch.eos_token_ids, arch.tie_embeddings) == (1e-6, "float32", (2, 5), True)
    assert arch.windows == (0, 0, 0)
    assert not (mixer.qkv_bias or mixer.o_bias or mixer.qk_norm or arch.layers[0].ffn.bias)


def test_defaults_of_the_families() -> None:
    assert parse_arch(LLAMA).n_kv_heads == 4
    assert parse_arch({**LLAMA, "attention_bias": True, "mlp_bias": True}).layers[0].ffn.bias
    qwen2 = parse_arch(QWEN2).layers[0].mixer
    assert qwen2.qkv_bias and not qwen2.o_bias
    mimo = parse_arch({**QWEN2, "architectures": ["MiMoForCausalLM"], "model_type": "mimo"})
    assert mimo.layers[0].mixer == qwen2 and mimo.n_mtp_modules == 0
    qwen3 = parse_arch(QWEN3).layers[0].mixer
    assert qwen3.qk_norm is not None and (qwen3.head_dim, qwen3.qkv_bias) == (128, False)
    assert parse_arch({**QWEN3, "attention_bias": True}).layers[0].mixer.o_bias
    absent = {key: value for key, value in MISTRAL.items() if key != "num_key_value_heads"}
    refused(absent, "num_key_value_heads", "divisor of num_attention_heads = 4")
    assert parse_arch({**absent, "num_attention_heads": 16}).n_kv_heads == 8, "transformers' default"
    assert parse_arch({**MISTRAL, "num_attention_heads": 16, "num_key_value_heads": None}).n_kv_heads == 16


def test_windows() -> None:
    assert parse_arch(MISTRAL).windows == (4096,) * 3, "transformers' default"
    assert parse_arch({**MISTRAL, "sliding_window": None}).windows == (0,) * 3
    assert parse_arch({**MISTRAL, "sliding_window": 9}).windows == (9,) * 3
    assert parse_arch({**QWEN2, "sliding_window": 9}).windows == (0,) * 3, "use_sliding_window is off"
    sliding = {"use_sliding_window": True, "sliding_window": 9}
    assert parse_arch({**QWEN2, **sliding, "max_window_layers": 1}).windows == (0, 9, 9)
    types = ["sliding_attention", "full_attention", "full_attention"]
    assert parse_arch({**QWEN3, **sliding, "layer_types": types}).windows == (9, 0, 0)
    refused({**QWEN3, "layer_types": types}, "layer_types", "use_sliding_window")
    refused({**QWEN3, **sliding, "layer_types": types[:2]}, "layer_types", "num_hidden_layers = 3")
    refused({**QWEN3, **sliding, "layer_types": ["chunked_attention"] * 3}, "layer_types", "chunked_attention")
    refused({**MISTRAL, "layer_types": types}, "layer_types", "same for every layer")
    refused({**MISTRAL, "sliding_window": 0}, "sliding_window = 0", param="sliding_window")
    assert parse_arch({**LLAMA, "sliding_window": 9}).windows == (0,) * 3, "Llama has no such field"


def test_rope_spellings() -> None:
    old = parse_arch({**LLAMA, "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2}}).ropes
    new = parse_arch({**LLAMA, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500000}}).ropes
    assert old == new and (old[0].theta, old[0].factor, old[0].type) == (5e5, 2.0, "linear")
    assert parse_arch({**LLAMA, "rope_scaling": None, "rope_theta": 7e4}).ropes[0].theta == 7e4
    assert parse_arch(LLAMA).ropes[0].theta == 1e4
    both = {"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"rope_type": "linear", "factor": 3.0}}
    assert parse_arch({**LLAMA, **both}).ropes[0].type == "linear", "rope_scaling wins, as in transformers"


def test_contexts() -> None:
    """(stated, largest) context in tokens for each scaling."""

    def contexts(**rope: Any) -> tuple[int, int]:
        arch = parse_arch({**LLAMA, "rope_parameters": rope})
        return arch.max_position, arch.max_position_scaled

    yarn = {"rope_type": "yarn", "factor": 4.0}
    assert contexts() == (128, 128)
    assert contexts(**LLAMA3, original_max_position_embeddings=64) == (128, 128)
    assert contexts(rope_type="linear", factor=4.0) == contexts(rope_type="dynamic", factor=4.0) == (128, 512)
    assert contexts(**yarn, original_max_position_embeddings=128) == (512, 512)
    assert contexts(**yarn, original_max_position_embeddings=32) == (128, 128)
    assert contexts(**yarn) == (512, 512), "original defaults to max_position_embeddings"


def test_parameter_count() -> None:
    arch = parse_arch({**LLAMA, "num_key_value_heads": 2})
    layer = 64 * (64 + 32 + 32 + 64) + 3 * 64 * 96 + 2 * 64
    assert arch.n_parameters == 3 * layer + 64 + 2 * 256 * 64
    tied = parse_arch({**LLAMA, "num_key_value_heads": 2, "tie_word_embeddings": True})
    assert arch.n_parameters - tied.n_parameters == 256 * 64


def test_dtype_spellings() -> None:
    assert parse_arch({**LLAMA, "dtype": "bfloat16", "torch_dtype": "float16"}).dtype == "bfloat16"
    assert parse_arch({**LLAMA, "torch_dtype": "float16"}).dtype == "float16"
    refused({**LLAMA, "dtype": "float64"}, "dtype = 'float64'", "one of bfloat16, float16, float32")


ABSURD = {
    "vocab_size": [2**31, 0, -1, True, "256", 256.0, None, [256], 10**400],
    "num_hidden_layers": [10**6, 0],
    "hidden_size": [0, 2**40, 63],
    "intermediate_size": [0, 2**40],
    "num_attention_heads": [0, 5, 2**31],
    "num_key_value_heads": [0, 3, 8],
    "head_dim": [0, -16, 17, 10**6, 16.5],
    "max_position_embeddings": [0, 2**40, "128"],
    "rms_norm_eps": [0, -1e-6, float("nan"), float("inf"), "1e-6", 1.0],
    "rope_theta": [0, -1.0, float("nan"), float("inf"), 1, "10000"],
    "tie_word_embeddings": ["true", 1],
    "hidden_act": ["geglu", 3],
    "eos_token_id": [256, -1, "2", [2, 256], [[2]], True, list(range(200)) * 2],
    "partial_rotary_factor": [0, 0.2, 2],
    "quantization_config": [{"quant_method": "hqq"}, []],
    "is_encoder_decoder": [True],
    "rope_scaling": ["linear", [1], 3],
    "architectures": [[], ["MambaForCausalLM"], ["LlamaForCausalLM", "MistralForCausalLM"], "LlamaForCausalLM", [{}]],
    "model_type": ["mistral", 3],
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in ABSURD.items() for value in values])
def test_absurd_values_name_the_field(field: str, value: Any) -> None:
    blamed = "num_attention_heads" if (field, value) == ("hidden_size", 63) else field
    refused({**LLAMA, field: value}, blamed, param=blamed)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("Qwen2VLForCausalLM", "Qwen2ForCausalLM"),
        ("JambaForCausalLM", "BambaForCausalLM"),
        ("Llama4ForConditionalGeneration", "LlamaForCausalLM"),
        ("RWForCausalLM", ""),
        ("Exaone3ForCausalLM", "Exaone4ForCausalLM"),
    ],
)
def test_an_unknown_architecture_is_named_with_its_nearest(name: str, near: str) -> None:
    parts = (f"architecture '{name}' is not supported.", "Llama, Mistral, Qwen2, Qwen3, MiMo")
    refused({**LLAMA, "architectures": [name]}, *parts, param="architectures")
    with pytest.raises(ConfigError) as caught:
        parse_arch({**LLAMA, "architectures": [name]})
    start = caught.value.message.partition("Nearest to it ")[2].partition(".")[0]
    assert start.startswith((f"is {near}", f"are {near}")) if near else not start, caught.value.message
    assert start.count("For") <= 3


def test_folders_that_are_no_models(tmp_path: pathlib.Path) -> None:
    def said() -> str:
        with pytest.raises(ConfigError) as caught:
            read_arch(tmp_path)
        return caught.value.message

    assert "has no config.json" in said() and "it holds nothing: name a folder that has" in said()
    for i in range(10):
        (tmp_path / f"part{i}.safetensors").touch()
    assert "'part0.safetensors', " in said() and "and 2 more" in said() and "part9" not in said()
    (tmp_path / "snapshots/abc").mkdir(parents=True)
    write(tmp_path, "snapshots/abc/config.json", "{}")
    assert said().endswith("name " + str(tmp_path / "snapshots/abc"))
    (tmp_path / "other").mkdir()
    (tmp_path / "other/a.gguf").touch()
    assert said().endswith(f"name one of 2 models in it, as {tmp_path / 'other/a.gguf'}")
    (tmp_path / "snapshots/abc/config.json").unlink()
    assert said().endswith("name " + str(tmp_path / "other/a.gguf"))
    (tmp_path / "other/a.gguf").unlink()
    assert said().endswith(": name a folder that has config.json and *.safetensors, or a .gguf file")
    write(tmp_path, "adapter_config.json", json.dumps({"base_model_name_or_path": "org/base"}))
    assert "is an adapter (LoRA) of 'org/base', not a model" in said() and "quire merge MODEL" in said()
    write(tmp_path, "adapter_config.json", "not json")
    assert "is an adapter (LoRA), not a model" in said()


def test_missing_fields_are_named() -> None:
    for field in set(LLAMA) - {"architectures", "model_type"}:
        refused({key: value for key, value in LLAMA.items() if key != field}, f"{field} is missing", param=field)


@pytest.mark.parametrize(
    ("rope", "field"),
    [
        ({"rope_type": "longrope"}, "short_factor"),
        ({"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [0]}, "long_factor"),
        ({"type": "su"}, "type"),
        ({"rope_type": ["linear"]}, "rope_type"),
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "linear", "factor": 0.5}, "factor"),
        ({"rope_type": "linear", "factor": float("nan")}, "factor"),
        ({"rope_type": "dynamic", "factor": "2"}, "factor"),
        ({"rope_type": "default", "rope_theta": 0}, "rope_theta"),
        ({"rope_type": "llama3", "factor": 8.0}, "low_freq_factor"),
        ({**LLAMA3, "high_freq_factor": 1.0}, "high_freq_factor"),
        ({**LLAMA3, "original_max_position_embeddings": 0}, "original_max_position_embeddings"),
        ({"rope_type": "yarn", "factor": 2.0, "beta_fast": -1}, "beta_fast"),
        ({"rope_type": "yarn", "factor": 2.0, "attention_factor": 0}, "attention_factor"),
        ({"rope_type": "yarn", "factor": 2.0, "truncate": 1}, "truncate"),
        ({"rope_type": "default", "partial_rotary_factor": 1.5}, "partial_rotary_factor"),
        ({"rope_type": "default", "mrope_section": [1, 2]}, "mrope_section"),
        ({"full_attention": {"rope_type": "default"}}, "full_attention"),
    ],
)
def test_rope_refusals(rope: dict[str, Any], field: str) -> None:
    for spelling in ("rope_scaling", "rope_parameters"):
        refused({**LLAMA, spelling: rope}, spelling, field, param=field)


def test_a_known_architecture_needs_no_code_of_the_checkpoint(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    for value in ({"AutoModelForCausalLM": "modeling_evil.Evil"}, {}, None, ["x"]):
        assert parse_arch({**LLAMA, "auto_map": value}) == parse_arch(LLAMA)
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "auto_map": {"AutoModel": "modeling_evil.Evil"}}))
    (tmp_path / "modeling_evil.py").write_text("raise SystemExit")
    assert read_arch(tmp_path) == read_arch(tmp_path, None, logging.getLogger("quire.test")) == parse_arch(LLAMA)
    (told,) = caplog.messages
    assert told.startswith("config.json's auto_map is not followed: Quire has its own LlamaForCausalLM")


def test_custom_code_of_other_architectures_is_refused() -> None:
    code = {"AutoModelForCausalLM": "modeling_evil.Evil"}
    refused(
        {**LLAMA, "architectures": ["EvilForCausalLM"], "auto_map": code}, "'EvilForCausalLM' is not supported",
        "auto_map", "modeling_evil", "never run", param="architectures",
    )  # fmt: skip
    refused({**LLAMA, "model_type": "evil", "auto_map": code}, "model_type = 'evil'", "never run", param="model_type")
    part = {**LLAMA, "text_config": {"auto_map": code}}
    refused(part, "'text_config'", "auto_map", """--hf-overrides '{"text_config": null}'""", param="auto_map")
    assert parse_arch(merged(part, {"text_config": None})) == parse_arch(LLAMA), "as the error says"
    refused({**LLAMA, "x": [{"y": {"auto_map": None}}]}, "auto_map")
    deep: Any = {"auto_map": code}
    for _ in range(100):
        deep = {"x": deep}
    refused({**LLAMA, "x": deep}, "nested more than 64 levels")


def test_model_type_alone(tmp_path: pathlib.Path) -> None:
    for name, family in FAMILIES.items():
        config = {**LLAMA, "architectures": None, "model_type": family.model_type, "num_key_value_heads": 2}
        config |= {"num_heads": 2, "mamba_n_heads": 2, "n_groups": 1}
        config = {family.keys.get(key, key): value for key, value in config.items()}
        assert parse_arch(config) == parse_arch({**config, "architectures": [name]})
    refused({**LLAMA, "architectures": None, "model_type": "mamba"}, "architectures")


def test_the_layout_of_the_authors_library_is_told() -> None:
    first = {"d_model": 64, "n_layer": 2, "vocab_size": 256, "ssm_cfg": {}, "rms_norm": True}
    refused(first, "a Mamba in the layout of the mamba_ssm library", "only as transformers saves it")
    refused({**first, "ssm_cfg": {"layer": "Mamba2"}}, "a Mamba-2 in the layout", "convert_mamba2_ssm_checkpoint")


def write(folder: pathlib.Path, name: str, content: str | bytes) -> None:
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


DAMAGED = ["", "{", "[]", "3", "null", "[" * 10**6, b"\xff\xfe", '{"a": 1' + "0" * 5000 + "}"]


@pytest.mark.parametrize("content", DAMAGED)
def test_damaged_files(content: str | bytes, tmp_path: pathlib.Path) -> None:
    write(tmp_path, "config.json", content)
    with pytest.raises(ConfigError, match=r"config\.json") as caught:
        read_arch(tmp_path)
    assert len(caught.value.message) < 2000


def test_not_a_regular_file(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "config.json"
    path.symlink_to("/no/such/file")
    with pytest.raises(ConfigError, match="No such file"):
        read_arch(tmp_path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ConfigError, match="not a regular file"):
        read_arch(tmp_path)
    path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises(ConfigError, match="not a regular file"):
        read_arch(tmp_path)
    path.unlink()
    with open(path, "wb") as file:
        file.truncate(65 << 20)
    with pytest.raises(ConfigError, match="larger than 67,108,864 bytes"):
        read_arch(tmp_path)


def test_reads_a_file(tmp_path: pathlib.Path) -> None:
    write(tmp_path, "config.json", json.dumps(LLAMA))
    assert read_arch(tmp_path) == parse_arch(LLAMA)


fields = st.sampled_from([*LLAMA, *ABSURD, "rope_parameters", "layer_types", "sliding_window", "use_sliding_window"])
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from([2, 4, 64, "yarn"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5) | fields, inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=200)
@given(st.sampled_from([LLAMA, QWEN2, QWEN3, MISTRAL]), st.dictionaries(fields, values, max_size=4))
def test_any_values_give_an_arch_or_a_config_error(base: dict[str, Any], changes: dict[str, Any]) -> None:
    try:
        arch = parse_arch({**base, **changes})
    except ConfigError:
        return
    assert arch.n_heads % arch.n_kv_heads == 0 and arch.head_dim % 2 == 0 and len(arch.windows) == arch.n_layers


@pytest.fixture
def arch() -> ModelArch:
    return parse_arch({**LLAMA, "eos_token_id": 2})


def test_generation_defaults(arch: ModelArch, tmp_path: pathlib.Path) -> None:
    assert read_generation(tmp_path, arch).eos_token_ids == (2,)
    given_values = {"eos_token_id": [7, 9], "temperature": 0.7, "top_k": 20, "top_p": 0.8, "do_sample": True, "x": 1}
    write(tmp_path, "generation_config.json", json.dumps(given_values))
    defaults = read_generation(tmp_path, arch)
    assert defaults.eos_token_ids == (7, 9)
    assert defaults.sampling == {"temperature": 0.7, "top_k": 20, "top_p": 0.8}
    write(tmp_path, "generation_config.json", '{"do_sample": false, "temperature": 0.7}')
    assert read_generation(tmp_path, arch).sampling == {"temperature": 0.0}
    assert read_generation(tmp_path, arch).eos_token_ids == (2,)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("{", "generation_config.json"),
        ("[]", "JSON object"),
        ('{"eos_token_id": 256}', "eos_token_id = 256"),
        ('{"temperature": -1}', "temperature = -1"),
        ('{"top_p": NaN}', "top_p"),
        ('{"top_k": "many"}', "top_k = 'many'"),
    ],
)
def test_bad_generation_config_is_a_warning(
    content: str, named: str, arch: ModelArch, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, "generation_config.json", content)
    with caplog.at_level(logging.WARNING, logger="quire"):
        defaults = read_generation(tmp_path, arch)
    assert defaults.eos_token_ids == (2,) and defaults.sampling == {}
    assert named in caplog.text and "ignored" in caplog.text
