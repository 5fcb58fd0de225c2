"""Which checkpoints have an MTP module that can be read, and under which names."""

from __future__ import annotations

import logging
import pathlib
from typing import Any

import pytest

from quire.config.model import parse_arch
from quire.config.mtp import mtp_head, mtp_prefix
from quire.core.errors import ConfigError

SIZES: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "num_nextn_predict_layers": 1,
}  # fmt: skip
FOLDER = pathlib.Path("here")
LOG = logging.getLogger("test")


def test_its_layer_is_the_models_last() -> None:
    arch = parse_arch({**SIZES, "architectures": ["Qwen3ForCausalLM"]})
    head = mtp_head(FOLDER, arch, LOG)
    assert head.prefix == "model.layers.6." and head.arch.layers == arch.layers[-1:]
    assert head.taps_of(arch.n_layers) == (6,), "what the last layer leaves"
    head.check(str(FOLDER), arch)


def test_a_family_has_names_of_its_own() -> None:
    arch = parse_arch({**SIZES, "architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 2})
    assert [mtp_prefix(arch, number) for number in range(2)] == ["model.mtp_layers.0.", "model.mtp_layers.1."]
    assert mtp_head(FOLDER, arch, LOG).layout.feature_first


@pytest.mark.parametrize(
    ("folder", "changes", "said"),
    [
        (
            "here",
            {"num_nextn_predict_layers": 0},
            "here has no MTP module, as its config.json has no num_nextn_predict",
        ),
        ("here.gguf", {}, "MTP modules of GGUF files are not read, and here.gguf is one"),
        ("here", {"architectures": ["CohereForCausalLM"]}, "behind RMS norms, and here describes cohere"),
    ],
)
def test_what_cannot_be_read_says_why(folder: str, changes: dict[str, Any], said: str) -> None:
    arch = parse_arch({**SIZES, "architectures": ["LlamaForCausalLM"], **changes})
    with pytest.raises(ConfigError, match="ngram") as refused:
        mtp_head(pathlib.Path(folder), arch, LOG)
    assert said in str(refused.value) and refused.value.param == "speculative_config"


def test_a_module_for_another_model_is_refused() -> None:
    arch = parse_arch({**SIZES, "architectures": ["LlamaForCausalLM"]})
    other = parse_arch({**SIZES, "architectures": ["LlamaForCausalLM"], "hidden_size": 32})
    with pytest.raises(ConfigError, match="the MTP module here reads states of 64 numbers and those"):
        mtp_head(FOLDER, arch, LOG).check(str(FOLDER), other)
