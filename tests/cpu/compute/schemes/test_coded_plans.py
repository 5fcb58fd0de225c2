"""Of a quantised checkpoint the planner takes the matrices to be kept that the engine keeps, and in as many bytes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch

from quire.bench.shape import FOLDER
from quire.cli.plan import KEPT_BLOCKS
from quire.compute.schemes import w8a8
from quire.compute.schemes.choice import held_on
from quire.compute.schemes.holding import holding
from quire.compute.weights.dummy import implied
from quire.config.model import read_arch
from quire.config.parameters import HEAD, Kept, matrices
from quire.planner.accelerators import accelerator_named
from quire.planner.coded import formats_of

CHANNELS = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
INPUTS = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}


def compressed(form: str, weights: dict[str, Any], inputs: dict[str, Any] | None, *ignore: str) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    groups = {"group_0": group}
    return {"quant_method": "compressed-tensors", "format": form, "ignore": list(ignore), "config_groups": groups}


CONFIGS = {
    "fp8": {"quant_method": "fp8"},
    "fp8 blocks": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "fp8 odd blocks": {"quant_method": "fp8", "weight_block_size": [64, 64]},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True},
    "awq but": {"quant_method": "awq", "bits": 4, "group_size": 64, "modules_to_not_convert": ["self_attn"]},
    "gptq 4": {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True},
    "gptq 4 whole": {"quant_method": "gptq", "bits": 4, "group_size": -1, "desc_act": False, "sym": True},
    "gptq 4 wide": {"quant_method": "gptq", "bits": 4, "group_size": 96, "desc_act": False, "sym": True},
    "gptq 4 order": {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True, "sym": True},
    "gptq 8": {"quant_method": "gptq", "bits": 8, "group_size": 128, "desc_act": False, "sym": True},
    "gptq 2": {"quant_method": "gptq", "bits": 2, "group_size": 64, "desc_act": False, "sym": True},
    "int8": compressed("int-quantized", CHANNELS, INPUTS, "lm_head"),
    "int8 with a head": compressed("int-quantized", CHANNELS, INPUTS),
    "int8 alone": compressed("int-quantized", CHANNELS, None, "lm_head", "re:.*self_attn.*"),
    "nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]},
    "mxfp4 packed": compressed(
        "mxfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}, None, "lm_head"
    ),
    "nf4": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "mxfp4": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]},
}


@pytest.mark.parametrize("shape", ["qwen3-0.6b", "llama-3.1-8b", "mixtral-8x7b", "gpt-oss-20b", "deepseek-v2-lite"])
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("gpu", ["", "a100-80", "h100"])
def test_what_is_kept(monkeypatch: pytest.MonkeyPatch, shape: str, name: str, gpu: str) -> None:
    if name != "mxfp4 packed" and (name == "mxfp4") != (shape == "gpt-oss-20b"):
        pytest.skip("this MXFP4 is gpt-oss's")
    device = accelerator_named(gpu or "h200")
    if not gpu:
        device = msgspec.structs.replace(device, is_host=True)
    monkeypatch.setattr(w8a8, "converts_to_e4m3", lambda _: "fp8" in device.flops_per_s)
    layers: dict[str, Any] = {"num_hidden_layers": 2}
    if shape == "gpt-oss-20b":
        layers["layer_types"] = ["sliding_attention", "full_attention"]
    arch = read_arch(FOLDER / shape, {"quantization_config": CONFIGS[name], **layers})
    formats = formats_of(arch, "auto", "auto", device)
    on = torch.device("cuda" if gpu else "cpu")
    held = holding("auto", on, torch.bfloat16, arch, implied(arch, torch.bfloat16))
    for matrix in matrices(arch):
        if matrix.kept is not Kept.BY_SCHEME:
            continue
        kept, scheme = formats.head if matrix.name == HEAD else formats.kept(matrix), held.get(matrix.name)
        assert kept.is_rounded is (scheme is not None), f"{matrix.name}: {kept.name}, and the engine has {scheme}"
        if scheme is not None:
            n_bytes = scheme.n_bytes(matrix.n_out, matrix.n_in)
            assert kept.n_bytes(matrix.n_out, matrix.n_in) == pytest.approx(n_bytes, rel=0.035), matrix.name


@pytest.mark.parametrize("device", KEPT_BLOCKS)
def test_blocks_of_gguf_files_that_stay_are_those_of_the_engine(device: str) -> None:
    held = held_on(torch.device(device), torch.bfloat16).values()
    assert set(KEPT_BLOCKS[device]) == {dtype for types in held for dtype in types}
