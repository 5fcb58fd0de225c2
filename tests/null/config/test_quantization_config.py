"""What a config.json says of quantised matrices: read for each method, or refused with the key and what works."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest

from quire.config.codings import Coding, Layout
from quire.config.model import parse_arch, read_arch
from quire.core.errors import ConfigError

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 128,
}  # fmt: skip
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64}
AWQ = {"quant_method": "awq", "w_bit": 4, "q_group_size": 128}
NF4 = {"quant_method": "bitsandbytes", "bnb_4bit_quant_type": "nf4"}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64, "symmetric": True}
FLOAT8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
FLOAT4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
GROUPS4 = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
TOKENS = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}


def compressed(form: str = "pack-quantized", weights: dict[str, Any] = INT4, **more: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, **more}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups, "ignore": ["lm_head"]}


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({**GPTQ, "group_size": -1, "sym": False}, "GPTQ, int4 by channel, with zero points"),
        ({**GPTQ, "desc_act": True}, "GPTQ, int4 in groups of 64, in the order of activations"),
        ({**AWQ, "version": "GEMM"}, "AWQ, int4 in groups of 128, with zero points"),
        ({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}, "FP8, FP8 in blocks of 128 x 128"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "ModelOpt, FP8 by channel"),
        (MODELOPT, "ModelOpt, NVFP4 in groups of 16"),
        ({**MODELOPT, "quant_method": "modelopt_fp4"}, "ModelOpt, NVFP4 in groups of 16"),
        (compressed("nvfp4-pack-quantized", FLOAT4), "compressed-tensors, NVFP4 in groups of 16"),
        (compressed("mxfp4-pack-quantized", GROUPS4), "compressed-tensors, MXFP4 in groups of 32"),
        (compressed("mixed-precision", GROUPS4, format="mxfp4-pack-quantized"),
         "compressed-tensors, MXFP4 in groups of 32"),
        ({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, "MXFP4, MXFP4 in groups of 32"),
        ({**NF4, "load_in_4bit": True}, "bitsandbytes, NF4 by channel"),
        (compressed(), "compressed-tensors, int4 in groups of 64"),
        (compressed("float-quantized", FLOAT8, input_activations=TOKENS), "compressed-tensors, FP8 by channel"),
    ],
)  # fmt: skip
def test_each_method_in_words(value: dict[str, Any], words: str) -> None:
    codings = parse_arch({**LLAMA, "quantization_config": value}).codings
    assert codings is not None and codings.words == words


def test_groups_of_modules_have_their_own_coding() -> None:
    """A module's name goes before its class, wherever it stands."""
    value = compressed("mixed-precision", FLOAT8, format="float-quantized")
    value["config_groups"]["group_1"] = {
        "targets": ["re:.*down_proj", "model.layers.0.self_attn.q_proj"], "weights": INT4, "format": "pack-quantized",
    }  # fmt: skip
    codings = parse_arch({**LLAMA, "quantization_config": value}).codings
    assert codings is not None
    found = {name: codings.of(f"model.layers.{name}") for name in ("0.self_attn.q_proj", "1.mlp.down_proj", "1.x")}
    layouts = {name: one.layout for name, one in found.items() if isinstance(one, Coding)}
    assert layouts == {"0.self_attn.q_proj": Layout.PACKED, "1.mlp.down_proj": Layout.PACKED, "1.x": Layout.SCALED}


def test_what_modelopt_says_in_a_file_of_its_own(tmp_path: pathlib.Path) -> None:
    """Where config.json says nothing."""
    beside = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "group_size": 16}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(beside))
    for value, words in ((None, "ModelOpt, NVFP4 in groups of 16"), (GPTQ, "GPTQ, int4 in groups of 64")):
        (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "quantization_config": value}))
        codings = read_arch(tmp_path).codings
        assert codings is not None and codings.words == words
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"kv_cache_quant_algo": "FP8"}}))
    assert read_arch(tmp_path).codings is None


def test_no_target_keeps_the_loader_busy() -> None:
    """One of a file that somebody else wrote, and a name that `re` would not come back from."""
    codings = parse_arch({**LLAMA, "quantization_config": compressed(targets=["re:(.*.*)*x", "re:(a+)+$"])}).codings
    assert codings is not None and codings.of("a" * 10_000 + "!") is None


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([], "quantization_config = [] must be an object"),
        ({"quant_method": "hqq"}, "quant_method = 'hqq' is not read; gptq, awq, fp8, modelopt, compressed-tensors"),
        ({"quant_method": ["x"]}, "quant_method = ['x'] is not read"),
        ({**GPTQ, "bits": 3}, "bits = 3 is not supported: 2, 4 and 8 are read. Take"),
        ({"quant_method": "gptq", "group_size": 64}, "quantization_config: bits is missing: 2, 4 and 8 are read. Take"),
        ({**GPTQ, "bits": 4.0}, "bits = 4.0 is not supported: 2, 4 and 8 are read. Take"),
        ({**GPTQ, "group_size": 0}, "group_size = 0 must be -1 or a number of inputs"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format = 'marlin'"),
        ({**GPTQ, "dynamic": {"+:.*": {"bits": 8}}}, "dynamic = "),
        ({**AWQ, "version": "gemv"}, "version = 'gemv' is not supported"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt = 'e5m2' is not supported: only e4m3 is read"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size = [128] must be two numbers"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, "quant_algo = 'NVFP4_AWQ' is not supported"),
        ({**MODELOPT, "group_size": 32}, "group_size = 32 is not supported: only 16 is read"),
        ({**NF4, "load_in_8bit": True}, "load_in_8bit = True is not supported: only false is read"),
        (NF4, "load_in_4bit is missing: only true is read"),
        (compressed("nvfp4-pack-quantized"), "type = 'int' is not supported: only float"),
        (compressed("nvfp4-pack-quantized", FLOAT4 | {"group_size": 32}), "group_size = 32 is not supported: only 16"),
        (compressed("mxfp4-pack-quantized"), "type = 'int' is not supported: only float"),
        (compressed("mxfp4-pack-quantized", FLOAT4), "strategy = 'tensor_group' is not supported: only group is read"),
        (compressed("mxfp4-pack-quantized", GROUPS4 | {"group_size": 16}), "group_size = 16 is not supported: only 32"),
        (compressed("mxfp4-pack-quantized", GROUPS4 | {"symmetric": False}), "symmetric = False is not supported"),
        (compressed("mxfp6-pack-quantized", GROUPS4), "format = 'mxfp6-pack-quantized' is not supported: pack-quan"),
        (compressed(weights=INT4 | {"num_bits": 3}), "weights: num_bits = 3 is not supported: 4 and 8 are read"),
        (compressed(weights=INT4 | {"num_bits": 4.0}), "weights: num_bits = 4.0 is not supported: 4 and 8 are read"),
        (compressed(weights=INT4 | {"actorder": "x"}), "actorder = 'x' is not supported: group, dynamic, true,"),
        (compressed(weights=FLOAT8), "type = 'float' is not supported: only int in pack-quantized"),
        (compressed(targets=["re:("]), "targets has 're:(': it ends too early"),
        (compressed(targets=[r"re:(a)\1"]), r"\1 is not read: write it in another way, or the names out"),
        (compressed(targets=["re:" + "a?" * 600]), "it has 1,200 characters, at most 1,024 are read"),
        (compressed(targets=["re:.*"] * 257), "257 targets are regular expressions behind re:, at most 256"),
        (compressed(output_activations=TOKENS), "output_activations = {"),
        (compressed() | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "format = 'sparse-24-bitmask'"),
        (compressed() | {"transform_config": {"config_groups": {}}}, "transform_config = "),
    ],
)  # fmt: skip
def test_what_is_not_read_is_named_with_what_is(value: Any, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_arch({**LLAMA, "quantization_config": value})
    assert said in caught.value.message and caught.value.param == "quantization_config"
