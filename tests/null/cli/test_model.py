"""From the command line to an EngineConfig, with bundled shapes."""

from __future__ import annotations

import argparse
import json

import msgspec
import pytest

from quire.bench.shape import FOLDER
from quire.cli.main import main
from quire.cli.model import add_engine_flags, engine_config
from quire.compute.weights.hub import find_checkpoint, is_on_hub
from quire.config.engine import EngineConfig
from quire.config.flags import FlagParser
from quire.config.model import read_arch
from quire.config.options import keyword_options
from quire.core.errors import ConfigError, LoadError


def parsed(*words: str) -> argparse.Namespace:
    parser = FlagParser()
    add_engine_flags(parser)
    return parser.parse_args(list(words))


def test_argument_and_flag_name_the_same_thing() -> None:
    assert engine_config(parsed("a/b")).model == engine_config(parsed("--model", "a/b")).model == "a/b"
    assert engine_config(parsed("a", "--model", "a")).model == "a"
    assert engine_config(parsed()) == EngineConfig()


def test_defaults_of_a_command_yield_to_flags() -> None:
    assert engine_config(parsed(), max_model_len=5, model="x").max_model_len == 5
    given = engine_config(parsed("--max-model-len", "9", "--model", "y"), max_model_len=5, model="x")
    assert (given.max_model_len, given.model) == (9, "y")


def test_a_shape_keeps_its_name_and_has_random_weights() -> None:
    config = engine_config(parsed("shape:qwen3-0.6b"))
    assert config.load_format == "dummy" and config.skip_tokenizer_init
    assert config.model == "shape:qwen3-0.6b" and not is_on_hub(config.model)
    assert find_checkpoint(config.model) == FOLDER / "qwen3-0.6b"
    for other in ("shape:", "shape:../shapes/qwen3-0.6b", "shape:qwen3"):
        with pytest.raises(LoadError, match="neither an existing folder"):
            find_checkpoint(other)


def test_an_unknown_shape_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"did you mean shape:qwen3-0.6b\?"):
        engine_config(parsed("shape:qwen3-0.6"))


def test_python_takes_a_shape_as_the_command_line_does() -> None:
    config = keyword_options(EngineConfig, {"model": "shape:qwen3-0.6b", "load_format": None}, "LLM")
    assert config == engine_config(parsed("shape:qwen3-0.6b"))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=EngineConfig) == config
    with pytest.raises(ConfigError, match=r"did you mean shape:qwen3-0.6b\?"):
        keyword_options(EngineConfig, {"model": "shape:qwen3-0.6"}, "LLM")


def test_a_shape_has_no_weights_to_read() -> None:
    with pytest.raises(ConfigError, match=r"reads weights, and shape:qwen3-0\.6b has none"):
        engine_config(parsed("shape:qwen3-0.6b", "--load-format", "safetensors"))


@pytest.mark.parametrize("words, said", [
    (("quantize", "shape:olmoe-1b-7b", "OUT", "--calibrate", "cal.txt"), "is a shape and has no weights to quantise"),
    (("merge", "shape:olmoe-1b-7b", "adapter", "OUT"), "shape:olmoe-1b-7b is a shape and has no weights to merge into"),
    (("generate", "shape:olmoe-1b-7b", "-p", "Hi"), "quire bench throughput shape:olmoe-1b-7b, or send token ids to"),
    (("generate", "demo", "--skip-tokenizer-init", "-p", "Hi"), "leave --skip-tokenizer-init out, or send token ids"),
    (("serve", "shape:olmoe-1b-7b", "--chat-template", "ct.jinja"), "--chat-template needs a tokenizer"),
])  # fmt: skip
def test_what_a_shape_lacks(words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(list(words)) == 2
    assert said in " ".join(capsys.readouterr().err.split())


PARAMETERS = {
    "gemma-3-1b": 999_885_952, "llama-3.1-8b": 8_030_261_248, "llama-3.2-1b": 1_235_814_400, "qwen3-0.6b": 596_049_920,
    "olmoe-1b-7b": 6_919_161_856, "qwen3-30b-a3b": 30_532_122_624,
    "deepseek-v2-lite": 15_706_484_224,
}  # fmt: skip
"""As published with the checkpoints of these shapes."""
RECURRENT = {"mamba2-2.7b": 2_702_599_680, "lfm2-1.2b": 1_170_340_608}


@pytest.mark.parametrize("name", sorted(PARAMETERS.keys() - {"deepseek-v2-lite"}))
def test_shapes_have_the_published_number_of_parameters(name: str) -> None:
    c = json.loads((FOLDER / name / "config.json").read_text())
    heads, kv, hidden, dim = *(c[f"num_{kind}_heads"] for kind in ("attention", "key_value")), c["hidden_size"], 128
    dim = c.get("head_dim", dim)
    n_norms = 4 if c["model_type"] == "gemma3_text" else 2
    inner, n_experts = c.get("moe_intermediate_size", c["intermediate_size"]), c.get("num_experts", 1)
    layer = hidden * dim * (2 * heads + 2 * kv) + 3 * hidden * inner * n_experts + n_norms * hidden
    layer += hidden * n_experts if n_experts > 1 else 0
    layer += {"llama": 0, "olmoe": 2 * hidden}.get(c["model_type"], 2 * dim)
    embeddings = c["vocab_size"] * hidden * (1 if c["tie_word_embeddings"] else 2)
    assert layer * c["num_hidden_layers"] + embeddings + hidden == PARAMETERS[name]


def test_latent_shapes_have_the_published_number_of_parameters() -> None:
    c = json.loads((FOLDER / "deepseek-v2-lite" / "config.json").read_text())
    hidden, heads, line = c["hidden_size"], c["num_attention_heads"], c["kv_lora_rank"]
    expert = c["moe_intermediate_size"]
    attention = hidden * heads * (128 + 64) + hidden * (line + 64) + line + line * heads * 256 + heads * 128 * hidden
    sparse = 3 * hidden * expert * (c["n_routed_experts"] + c["n_shared_experts"]) + hidden * c["n_routed_experts"]
    layers = 27 * (attention + 2 * hidden) + 3 * hidden * c["intermediate_size"] + 26 * sparse
    assert layers + 2 * c["vocab_size"] * hidden + hidden == PARAMETERS["deepseek-v2-lite"]


@pytest.mark.parametrize("name", sorted(RECURRENT))
def test_recurrent_shapes_have_the_published_number_of_parameters(name: str) -> None:
    assert read_arch(FOLDER / name).n_parameters == RECURRENT[name]
