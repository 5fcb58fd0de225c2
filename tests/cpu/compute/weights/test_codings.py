"""Coded matrices decoded: equal, bit for bit, to what the packages that write them make of their own tensors."""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Mapping

import pytest
import torch
from coded_checkpoints import FORMATS
from safetensors import safe_open
from safetensors.torch import load_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from quire.compute.schemes.coded import Coded
from quire.compute.weights.codings import READERS
from quire.config.codings import read_codings
from quire.config.fields import Fields
from quire.kernels.e4m3 import E4M3

ARRAYS = pathlib.Path(__file__).with_name("coded_arrays.safetensors")
"""Written by `write_coded_arrays.py`."""
with safe_open(ARRAYS, "pt") as file:
    CONFIGS = {case: json.loads(config) for case, config in file.metadata().items()}
DTYPES = {
    torch.int32: "I32", torch.int64: "I64", torch.int8: "I8", torch.uint8: "U8", torch.float32: "F32",
    torch.float16: "F16", torch.bfloat16: "BF16", torch.float8_e4m3fn: "F8_E4M3",
}  # fmt: skip


def coded_of(config: object, tensors: Mapping[str, torch.Tensor], n: int, k: int) -> Coded:
    """As the loader reads it, once shapes and dtypes are checked."""
    codings = read_codings(Fields({"quantization_config": config}, "config.json"))
    assert codings is not None
    coding = codings.of("model.layers.0.mlp.up_proj")
    assert coding is not None
    reader = READERS[coding.layout]
    assert set(reader.needed(coding)) <= set(tensors) <= set(reader.kinds)
    for kind, (shapes, dtypes) in reader.allowed(coding, n, k).items():
        if kind in tensors:
            assert tuple(tensors[kind].shape) in shapes and DTYPES[tensors[kind].dtype] in dtypes, kind
    return reader.read(coding, tensors, n, k)


def decoded(coded: Coded, dtype: torch.dtype) -> torch.Tensor:
    out = torch.empty(coded.n, coded.k, dtype=dtype)
    coded.decode(out)
    return out


@pytest.mark.parametrize("case", sorted(CONFIGS))
def test_numbers_are_those_of_the_package(case: str) -> None:
    tensors = load_file(ARRAYS).items()
    found = {name.partition("|")[2]: one for name, one in tensors if name.startswith(f"{case}|")}
    expected = found.pop("decoded")
    whole = coded_of(CONFIGS[case], found, *expected.shape)
    assert torch.equal(decoded(whole, expected.dtype), expected)
    rows, columns = torch.tensor([5, 63, 0, 5]), (24, 40)
    part = decoded(whole.part(rows, columns), expected.dtype)
    assert torch.equal(part, expected[rows, columns[0] : sum(columns)])


def test_mxfp4_is_that_of_transformers() -> None:
    torch.manual_seed(0)
    blocks = torch.randint(0, 256, (1, 48, 3, 16), dtype=torch.uint8)
    scales = torch.randint(100, 140, (1, 48, 3), dtype=torch.uint8)
    expected = convert_moe_packed_tensors(blocks, scales)[0].t()
    coded = coded_of({"quant_method": "mxfp4"}, {"_blocks": blocks[0], "_scales": scales[0]}, 48, 96)
    assert torch.equal(decoded(coded, torch.bfloat16), expected)


def test_mxfp4_of_compressed_tensors_with_a_last_group_that_is_not_whole() -> None:
    """The same numbers as with codes up to its end."""
    torch.manual_seed(0)
    codes = torch.randint(0, 256, (8, 32), dtype=torch.uint8)
    scales = torch.randint(100, 140, (8, 2), dtype=torch.uint8)
    weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    config = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized", "config_groups": groups}
    whole = coded_of(config, {"weight_packed": codes, "weight_scale": scales}, 8, 64)
    for k in (45, 46):
        part = {"weight_packed": codes[:, :23].contiguous(), "weight_scale": scales}
        assert torch.equal(decoded(coded_of(config, part, 8, k), torch.float32), decoded(whole, torch.float32)[:, :k])


@pytest.mark.parametrize("block", [None, [128, 128], [64, 32]])
def test_fp8_is_that_of_transformers(block: list[int] | None) -> None:
    torch.manual_seed(0)
    weight = (torch.randn(256, 384) * 100).to(torch.float8_e4m3fn)
    scales = torch.rand(256 // block[0], 384 // block[1]) if block else torch.rand(1)
    expected = Fp8Dequantize(None)._dequantize_one(weight, scales.view(1, -1) if block is None else scales)
    config = {"quant_method": "fp8"} | ({"weight_block_size": block} if block else {})
    coded = coded_of(config, {"weight": weight, "weight_scale_inv": scales}, 256, 384)
    assert torch.equal(decoded(coded, torch.float32), expected)


def test_what_contradicts_itself_is_refused() -> None:
    words = torch.zeros(8, 64, dtype=torch.int32)
    gptq = {"qweight": words, "scales": torch.ones(2, 64).half(), "g_idx": torch.arange(64).int() // 16}
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    with pytest.raises(ValueError, match="g_idx names groups beyond the 2 that there are"):
        coded_of(config | {"desc_act": True}, gptq, 64, 64)
    order = "groups in another order than inputs, which are read where config.json has"
    with pytest.raises(ValueError, match=f"g_idx has {order} desc_act = true"):
        coded_of(config, gptq | {"g_idx": torch.arange(64).flip(0).int() // 32}, 64, 64)
    packed = {
        "weight_packed": torch.zeros(64, 8, dtype=torch.int32), "weight_scale": torch.ones(64, 1),
        "weight_g_idx": torch.arange(64).flip(0).int() // 32,
    }  # fmt: skip
    with pytest.raises(ValueError, match=f"weight_g_idx has {order} actorder = 'group'"):
        coded_of(FORMATS["packed-g128"].config, packed, 64, 64)
    coded_of(FORMATS["packed-g128"].config, packed | {"weight_g_idx": torch.full((64,), -1)}, 64, 64)
    nvfp4 = {
        "weight_packed": torch.zeros(4, 16, dtype=torch.uint8), "weight_scale": torch.ones(4, 2).to(E4M3),
        "weight_global_scale": torch.tensor([math.inf]),
    }  # fmt: skip
    with pytest.raises(ValueError, match="its scales are NaN or infinite, with weight_global_scale or without"):
        coded_of(FORMATS["nvfp4"].config, nvfp4, 4, 32)
    with pytest.raises(ValueError, match="sym is true, but qzeros has zero points beside 8"):
        coded_of(config, gptq | {"qzeros": torch.zeros(2, 8, dtype=torch.int32)}, 64, 64)
    state = torch.frombuffer(bytearray(b'{"quant_type": "nf4", "shape": [64, 2], "blocksize": 64}'), dtype=torch.uint8)
    nf4 = {
        "weight": torch.zeros(64, 1, dtype=torch.uint8), "weight.absmax": torch.ones(3),
        "weight.quant_map": torch.arange(16.0), "weight.quant_state.bitsandbytes__nf4": state,
    }  # fmt: skip
    with pytest.raises(ValueError, match="3 scales, not one for each 64 weights"):
        coded_of({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, nf4, 64, 2)
