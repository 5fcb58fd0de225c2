"""The config.json of a head: what published ones say, what is refused, and which models a head fits."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest

from quire.config.eagle import TAPS, parse_head, refuse_head
from quire.config.model import parse_arch
from quire.core.errors import ConfigError

PUBLISHED: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 128000, "eos_token_id": 128001, "hidden_act": "silu", "hidden_size": 4096,
    "intermediate_size": 14336, "max_position_embeddings": 2048, "mlp_bias": False, "model_type": "llama",
    "num_attention_heads": 32, "num_hidden_layers": 1, "num_key_value_heads": 8, "pad_token_id": 0,
    "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "tie_word_embeddings": False,
    "torch_dtype": "float16", "use_cache": True, "vocab_size": 128256, "draft_vocab_size": 32000,
}  # fmt: skip
"""As heads for Llama 3.1 8B are published."""
MODEL = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 4096,
}  # fmt: skip
FOLDER = pathlib.Path("some/head")


def test_a_published_head() -> None:
    head = parse_head(PUBLISHED)
    assert (head.vocab_size, head.arch.vocab_size, head.arch.n_layers) == (128256, 32000, 1)
    assert (head.arch.n_heads, head.arch.n_kv_heads, head.arch.head_dim) == (32, 8, 128)
    assert head.taps_of(32) == (2, 16, 29)
    head.check(str(FOLDER), parse_arch(MODEL))


@pytest.mark.parametrize(
    ("said", "taps"),
    [
        ({TAPS: [1, 14, 22]}, (1, 14, 22)),  # vLLM's: the layers that read the states
        ({"eagle_config": {TAPS: [1, 15, 28], "use_aux_hidden_state": True}}, (2, 16, 29)),  # those that leave them
        ({TAPS: [2, 16, 29], "eagle_config": {TAPS: [1, 15, 28]}}, (2, 16, 29)),
        ({TAPS: None, "eagle_config": {TAPS: [1, 15, 28]}}, (2, 16, 29)),
        ({TAPS: [1, 14, 22], "eagle_config": {"use_aux_hidden_state": True}}, (1, 14, 22)),
    ],
)
def test_layers_of_its_own(said: dict[str, Any], taps: tuple[int, ...]) -> None:
    """[1, n/2 - 1, n - 4] is what SpecForge writes of the layers that a head reads which does not say any."""
    assert parse_head(PUBLISHED | said).taps_of(32) == taps


def test_layers_that_do_not_fit_the_model() -> None:
    head = parse_head(PUBLISHED | {"eagle_config": {TAPS: [1, 15, 31]}})
    with pytest.raises(ConfigError) as refused:
        head.check(str(FOLDER), parse_arch(MODEL))
    assert "the states before layers 2, 16, 32 and the model has 32" in str(refused.value)
    assert f"set {TAPS} at the top level of its config.json, not in eagle_config" in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"draft_vocab_size": None}, "draft_vocab_size = None must be a number of tokens: this is no EAGLE-3 head"),
        ({"draft_vocab_size": 128257}, "draft_vocab_size = 128257 must be an integer from 1 to vocab_size = 128,256"),
        ({"num_hidden_layers": 2}, "num_hidden_layers = 2 must be an integer from 1 to 1"),
        ({"target_hidden_size": 5120}, "target_hidden_size = 5120 must be hidden_size = 4096"),
        ({"norm_before_residual": True}, "norm_before_residual = True must be False"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state = False must be True"),
        ({TAPS: [1, 5]}, "must be 3 numbers of layers, rising"),
        ({TAPS: [1, 5, 5]}, "must be 3 numbers of layers, rising"),
        ({"eagle_config": {TAPS: [-1, 5, 6]}}, "must be 3 numbers of layers, rising"),
        ({TAPS: [1, 2, 3], "eagle_config": {TAPS: [1, 2, 3]}},
         f"{TAPS} = [1, 2, 3] must be [2, 3, 4] beside eagle_config: [1, 2, 3], whose layers are those that leave"),
        ({"attention_bias": True}, "model_type = 'llama' must be that of a head without bias"),
        ({"hidden_act": "gelu"}, "model_type = 'llama' must be that of a head without bias"),
        ({"quantization_config": {"quant_method": "awq"}}, "must be absent: heads are read in floating numbers only"),
    ],
)  # fmt: skip
def test_what_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_head(PUBLISHED | changes, "config.json")
    assert said in str(refused.value)


def test_a_head_in_the_place_of_a_model(tmp_path: pathlib.Path) -> None:
    refuse_head(tmp_path, "org/head")
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    refuse_head(tmp_path, "org/head")
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED))
    with pytest.raises(ConfigError, match=r'^org/head is an EAGLE-3 head: use "method": "eagle3"'):
        refuse_head(tmp_path, "org/head")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": 5120, "head_dim": 128}, "reads states of 4096 numbers and those of the model have 5120: give"),
        ({"vocab_size": 128000}, "guesses for 128256 token ids and the model has 128000: give"),
        ({"num_hidden_layers": 4}, "before layers 2, 2, 1 and the model has 4, from 0: give"),
    ],
)
def test_a_model_that_it_does_not_fit(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_head(PUBLISHED).check(str(FOLDER), parse_arch(MODEL | changes))
    assert said in str(refused.value) and "some/head" in str(refused.value)
