"""Writes coded_arrays.safetensors: small matrices as the packages of each coding pack them, and decode them.

    pip install --no-deps --target P compressed-tensors==0.20.0 bitsandbytes==0.50.2 auto-gptq==0.7.1 \
        nvidia-modelopt==0.47.0 pydantic pydantic-core loguru annotated-types typing-inspection omegaconf \
        antlr4-python3-runtime==4.9.3 pulp rich scipy nvidia-ml-py
    pip download --no-deps --no-binary :all: --no-build-isolation autoawq==0.2.9    # unpack its awq/ into P
    PYTHONPATH=P python tests/cpu/compute/weights/write_coded_arrays.py P

AutoGPTQ's and AutoAWQ's files of one layer are run alone, as the packages themselves need a GPU to be imported.
"""

from __future__ import annotations

import importlib.util
import json
import pathlib
import sys
import types
from typing import Any

import torch
from safetensors.torch import save_file

TARGET = pathlib.Path(__file__).with_name("coded_arrays.safetensors")
N, K = 64, 128


def load(path: pathlib.Path, name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def groups_of(weight: torch.Tensor, group: int, bits: int, symmetric: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(scales, zero points) [n, k / group], the latter from 0."""
    parts, most = weight.float().view(N, -1, group), (1 << bits) - 1
    if symmetric:
        return (parts.abs().amax(2) * 2 / most).to(weight.dtype), torch.full((N, K // group), 1 << bits - 1)
    low, high = parts.amin(2).clamp(max=0), parts.amax(2).clamp(min=0)
    scales = ((high - low) / most).to(weight.dtype)
    return scales, (-low / scales.float()).round().clamp(0, most).long()


def compressed(bits: int, group: int, symmetric: bool, form: str, kind: str = "int") -> tuple[Any, ...]:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    weight = torch.randn(N, K).bfloat16()
    args = QuantizationArgs(
        num_bits=bits, type=kind, symmetric=symmetric, strategy="group" if group else "channel",
        group_size=group or None,
    )  # fmt: skip
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    if kind == "float":
        scales, zeros = (weight.abs().amax(1, keepdim=True) / 448).bfloat16(), None
    else:
        scales, zeros = groups_of(weight, group or K, bits, symmetric)
        zeros = None if symmetric else (zeros - (1 << bits - 1)).to(torch.int8)
    compressor = BaseCompressor.get_value_from_registry(form)
    state = {"weight": weight, "weight_scale": scales} | ({} if zeros is None else {"weight_zero_point": zeros})
    stored = compressor.compress(state, scheme)
    config = {
        "quant_method": "compressed-tensors", "format": form,
        "config_groups": {"group_0": json.loads(scheme.model_dump_json())},
    }  # fmt: skip
    return config, stored, compressor.decompress(dict(stored), scheme)["weight"]


def gptq(folder: pathlib.Path, bits: int, group: int, act_order: bool) -> tuple[Any, ...]:
    module = load(folder / "auto_gptq/nn_modules/qlinear/qlinear_cuda.py", "qlinear_cuda")
    linear = torch.nn.Linear(K, N, bias=False).half()
    layer = module.QuantLinear(bits, group, K, N, False)
    index = torch.arange(K) // group
    index = index[torch.randperm(K)] if act_order else index
    order = index.argsort(stable=True)
    scales, zeros = groups_of(linear.weight.data[:, order].contiguous(), group, bits, False)
    zeros = zeros.clamp(min=1)  # it packs zero - 1
    layer.pack(linear, scales.float(), zeros.float(), index.int())
    decoded = layer(torch.eye(K).half()).t()
    stored = {name: getattr(layer, name) for name in ("qweight", "qzeros", "scales", "g_idx")}
    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": act_order, "sym": False}
    return config, stored, decoded


def awq(folder: pathlib.Path, group: int) -> tuple[Any, ...]:
    for name in ("awq", "awq.utils", "awq.utils.module", "awq.utils.utils"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules["awq.utils.module"].try_import = lambda _: (None, "")  # type: ignore[attr-defined]
    sys.modules["awq.utils.utils"].get_best_device = lambda: "cpu"  # type: ignore[attr-defined]
    packing = load(folder / "awq/utils/packing_utils.py", "awq.utils.packing_utils")
    module = load(folder / "awq/modules/linear/gemm.py", "awq_gemm")
    linear = torch.nn.Linear(K, N, bias=False).half()
    scales, zeros = groups_of(linear.weight.data, group, 4, False)
    layer = module.WQLinear_GEMM.from_linear(linear, 4, group, scales=scales.t(), zeros=zeros.t())
    decoded = packing.dequantize_gemm(layer.qweight, layer.qzeros, layer.scales, 4, group).t()
    stored = {name: getattr(layer, name) for name in ("qweight", "qzeros", "scales")}
    return {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm"}, stored, decoded


def nvfp4() -> tuple[Any, ...]:
    """By compressed-tensors."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.quant_scheme import NVFP4

    weight = torch.randn(N, K, generator=torch.Generator().manual_seed(4)).bfloat16()
    scheme = QuantizationScheme(targets=["Linear"], **NVFP4)
    whole = (448 * 6 / weight.float().abs().max()).view(1)
    scales = (weight.float().view(N, -1, 16).abs().amax(2) / 6 * whole).to(torch.float8_e4m3fn).float()
    compressor = BaseCompressor.get_value_from_registry("nvfp4-pack-quantized")
    stored = compressor.compress({"weight": weight, "weight_scale": scales, "weight_global_scale": whole}, scheme)
    config = {
        "quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized",
        "config_groups": {"group_0": json.loads(scheme.model_dump_json())},
    }  # fmt: skip
    return config, stored, compressor.decompress(dict(stored), scheme)["weight"]


def nvfp4_modelopt() -> tuple[Any, ...]:
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    weight = torch.randn(N, K, generator=torch.Generator().manual_seed(5)).bfloat16()
    made, scales, whole = NVFP4QTensor.quantize(weight, 16)
    stored = {
        "weight": made._quantized_data, "weight_scale": scales, "weight_scale_2": whole,
        "input_scale": torch.tensor(1e-3),
    }  # fmt: skip
    decoded = made.dequantize(dtype=torch.bfloat16, scale=scales, double_scale=whole, block_sizes={-1: 16})
    return {"quant_method": "modelopt", "quant_algo": "NVFP4"}, stored, decoded


def nf4(nested: bool) -> tuple[Any, ...]:
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    weight = torch.randn(N, 96).bfloat16()
    codes, state = quantize_4bit(weight, quant_type="nf4", compress_statistics=nested, blocksize=64)
    stored = {"weight": codes, **{f"weight.{name}": one for name, one in state.as_dict(packed=True).items()}}
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    # Its decoder for CPUs needs rows of whole blocks: as one row, the codes are the same.
    as_row = quantize_4bit(weight.view(1, -1), quant_type="nf4", compress_statistics=nested, blocksize=64)
    return config, stored, dequantize_4bit(*as_row).view(N, -1)


def main() -> None:
    folder = pathlib.Path(sys.argv[1])
    torch.manual_seed(0)
    with torch.no_grad():
        cases = {
            "packed": compressed(4, 32, True, "pack-quantized"),
            "packed-zeros": compressed(4, 64, False, "pack-quantized"),
            "packed-channel-8": compressed(8, 0, True, "pack-quantized"),
            "int8": compressed(8, 0, True, "int-quantized"),
            "float8": compressed(8, 0, True, "float-quantized", "float"),
            "gptq": gptq(folder, 4, 32, act_order=False),
            "gptq-order-2": gptq(folder, 2, 32, act_order=True),
            "gptq-8": gptq(folder, 8, 64, act_order=False),
            "awq": awq(folder, 64),
            "nf4": nf4(nested=False),
            "nf4-nested": nf4(nested=True),
            "nvfp4": nvfp4(),
            "nvfp4-modelopt": nvfp4_modelopt(),
        }
    tensors, configs = {}, {}
    for case, (config, stored, decoded) in cases.items():
        configs[case] = json.dumps(config)
        found = {**stored, "decoded": decoded}
        tensors |= {f"{case}|{name}": one.contiguous().clone() for name, one in found.items()}
    save_file(tensors, TARGET, configs)


if __name__ == "__main__":
    main()
