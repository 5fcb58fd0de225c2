"""Matrices in the codings of quantised checkpoints: packed, and decoded again, by the packages that write these.

    pip install --no-deps --target P compressed-tensors==0.20.0 bitsandbytes==0.50.2 auto-gptq==0.7.1 \
        nvidia-modelopt==0.47.0 xllamacpp==2026.10.11549 pydantic pydantic-core loguru annotated-types \
        typing-inspection omegaconf antlr4-python3-runtime==4.9.3 pulp rich scipy nvidia-ml-py
    pip download --no-deps --no-binary :all: --no-build-isolation autoawq==0.2.9    # unpack its awq/ into P

P has to be on the path of modules. AutoGPTQ's and AutoAWQ's files of one layer are run alone, as the packages
themselves need a GPU to be imported. Of xllamacpp only llama.cpp's own encoder is called. What has no package here is
written by transformers. Values are rounded to the nearest everywhere: no writer sees activations.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import json
import pathlib
import sys
import types
from typing import Any

import gguf
import numpy as np
import torch

Written = tuple[dict[str, Any], dict[str, torch.Tensor], torch.Tensor]
"""(quantization_config, end of a tensor's name → tensor, the numbers [n, k] that the package decodes from them)."""

FP8_MAX = 448.0
ENCODED = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS")
"""Types of GGUF that the package gguf decodes only; llama.cpp encodes them."""


def groups_of(weight: torch.Tensor, group: int, bits: int, symmetric: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """weight [n, k] → (scales of its dtype, zero points from 0) [n, k / group]."""
    n, k = weight.shape
    parts, most = weight.float().view(n, -1, group), (1 << bits) - 1
    if symmetric:
        return (parts.abs().amax(2) * 2 / most).to(weight.dtype), torch.full((n, k // group), 1 << bits - 1)
    low, high = parts.amin(2).clamp(max=0), parts.amax(2).clamp(min=0)
    scales = ((high - low) / most).to(weight.dtype)
    return scales, (-low / scales.float()).round().clamp(0, most).long()


def at_levels(weight: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, bits: int) -> torch.Tensor:
    """What codes can stand for, nearest to a weight. Packers of GPTQ and AWQ expect it: a code too large is not cut
    off there, and its highest bit becomes the lowest of a neighbour's."""
    group = weight.shape[1] // scales.shape[1]
    wide, middle = (one.float().repeat_interleave(group, 1) for one in (scales, zeros))
    codes = ((weight.float() / wide).round() + middle).clamp(0, (1 << bits) - 1)
    return ((codes - middle) * wide).to(weight.dtype)


def compressed(weight: torch.Tensor, form: str, preset: str = "", **args: Any) -> Written:
    """By compressed-tensors. preset: name of one of its schemes; without one, args are those of its weights."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES

    parts = PRESET_SCHEMES[preset] if preset else {"weights": QuantizationArgs(**args)}
    scheme = QuantizationScheme(targets=["Linear"], **parts)
    compressor = BaseCompressor.get_value_from_registry(form)
    stored = compressor.compress({"weight": weight, **_scales_of(weight, scheme.weights)}, scheme)
    config = {
        "quant_method": "compressed-tensors", "format": form,
        "config_groups": {"group_0": json.loads(scheme.model_dump_json())},
    }  # fmt: skip
    return config, stored, compressor.decompress(dict(stored), scheme)["weight"]


def _scales_of(weight: torch.Tensor, args: Any) -> dict[str, torch.Tensor]:
    """What its compressors ask for beside a weight. args: a QuantizationArgs."""
    largest, strategy = weight.float().abs(), args.strategy
    if args.type == "float":
        if args.num_bits == 4:
            groups = largest.view(len(weight), -1, args.group_size).amax(2)
            if strategy == "tensor_group":
                whole = (FP8_MAX * 6 / largest.max()).view(1)
                scales = (groups / 6 * whole).to(torch.float8_e4m3fn).float()
                return {"weight_scale": scales, "weight_global_scale": whole}
            return {"weight_scale": torch.exp2(torch.floor(torch.log2(groups)) - 2).to(weight.dtype)}
        most = largest.max().view(1) if strategy == "tensor" else largest.amax(1, keepdim=True)
        return {"weight_scale": (most.to(weight.dtype) / FP8_MAX).to(weight.dtype)}
    scales, zeros = groups_of(weight, args.group_size or weight.shape[1], args.num_bits, args.symmetric)
    own = {} if args.symmetric else {"weight_zero_point": (zeros - (1 << args.num_bits - 1)).to(torch.int8)}
    return {"weight_scale": scales, **own}


def fp8_blocks(weight: torch.Tensor, block: int = 128) -> Written:
    """DeepSeek's blocks, by transformers. Both sizes are a multiple of `block`."""
    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    sizes = types.SimpleNamespace(weight_block_size=(block, block), scale_fmt="float")
    made = Fp8Quantize(types.SimpleNamespace(quantization_config=sizes)).convert({"weight": weight})
    wide = made["weight_scale_inv"].repeat_interleave(block, 0).repeat_interleave(block, 1)
    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [block, block]}
    return config, made, made["weight"].float() * wide


def gptq(weight: torch.Tensor, bits: int, group: int, index: torch.Tensor | None = None) -> Written:
    """By AutoGPTQ, with zero points. weight: float16 [n, k]; index: group of each input; None: in order."""
    n, k = weight.shape
    order = torch.arange(k) if index is None else index.argsort(stable=True)
    scales, zeros = groups_of(weight[:, order].contiguous(), group, bits, False)
    zeros = zeros.clamp(min=1)  # it packs zero - 1
    weight = at_levels(weight[:, order], scales, zeros, bits)[:, order.argsort()].contiguous()
    layer = _auto_gptq().QuantLinear(bits, group, k, n, False)
    places = torch.arange(k) // group if index is None else index
    layer.pack(_linear(weight), scales.float(), zeros.float(), places.int())
    decoded = layer(torch.eye(k).half()).t()
    stored = {name: getattr(layer, name) for name in ("qweight", "qzeros", "scales", "g_idx")}
    config = {
        "quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": index is not None, "sym": False
    }  # fmt: skip
    return config, stored, decoded


def awq(weight: torch.Tensor, group: int) -> Written:
    """By AutoAWQ. weight: float16 [n, k]."""
    packing, module = _auto_awq()
    scales, zeros = groups_of(weight, group, 4, False)
    weight = at_levels(weight, scales, zeros, 4)
    layer = module.WQLinear_GEMM.from_linear(_linear(weight), 4, group, scales=scales.t(), zeros=zeros.t())
    decoded = packing.dequantize_gemm(layer.qweight, layer.qzeros, layer.scales, 4, group).t()
    stored = {name: getattr(layer, name) for name in ("qweight", "qzeros", "scales")}
    return {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm"}, stored, decoded


def nf4(weight: torch.Tensor, nested: bool) -> Written:
    """By bitsandbytes, in blocks of 64. nested: scales in 8 bits too."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    codes, state = quantize_4bit(weight, quant_type="nf4", compress_statistics=nested, blocksize=64)
    stored = {"weight": codes, **{f"weight.{name}": one for name, one in state.as_dict(packed=True).items()}}
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    # Its decoder for CPUs needs rows of whole blocks: what was encoded as one row is decoded.
    row_codes, row_state = quantize_4bit(weight.view(1, -1), quant_type="nf4", compress_statistics=nested, blocksize=64)
    assert torch.equal(row_codes.view(-1), codes.view(-1)) and torch.equal(row_state.absmax, state.absmax)
    return config, stored, dequantize_4bit(row_codes, row_state).view(weight.shape)


def nvfp4_modelopt(weight: torch.Tensor) -> Written:
    """By ModelOpt."""
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    made, scales, whole = NVFP4QTensor.quantize(weight, 16)
    stored = {
        "weight": made._quantized_data, "weight_scale": scales, "weight_scale_2": whole,
        "input_scale": torch.tensor(1e-3),
    }  # fmt: skip
    decoded = made.dequantize(dtype=torch.bfloat16, scale=scales, double_scale=whole, block_sizes={-1: 16})
    return {"quant_method": "modelopt", "quant_algo": "NVFP4"}, stored, decoded


def mxfp4_blocks(weight: torch.Tensor) -> Written:
    """gpt-oss's tensors, with ModelOpt's codes and exponents."""
    from modelopt.torch.quantization.qtensor import MXFP4QTensor

    (n, k), (made, exponents) = weight.shape, MXFP4QTensor.quantize(weight, 32)
    stored = {"_blocks": made._quantized_data.view(n, k // 32, 16), "_scales": exponents.view(n, k // 32)}
    decoded = made.dequantize(dtype=torch.float32, scale=exponents, block_sizes={-1: 32})
    return {"quant_method": "mxfp4"}, stored, decoded


def gguf_blocks(weight: torch.Tensor, kind: str) -> tuple[np.ndarray[Any, Any], torch.Tensor]:
    """weight [n, k] → (its blocks [n, bytes of a row], the numbers that they stand for). kind: a type of GGUF."""
    numbers, dtype = np.ascontiguousarray(weight.float().numpy()), gguf.GGMLQuantizationType[kind]
    if kind in ENCODED:
        block, n_bytes = gguf.GGML_QUANT_SIZES[dtype]
        blocks = np.empty((len(numbers), numbers.shape[1] // block * n_bytes), np.uint8)
        taken = _encoder()(int(dtype), numbers.ctypes.data, blocks.ctypes.data, 0, *numbers.shape, None)
        if taken != blocks.nbytes:
            raise ValueError(f"llama.cpp wrote {taken:,} bytes of {kind}, not {blocks.nbytes:,}")
    else:
        blocks = gguf.quants.quantize(numbers, dtype)
    return blocks, torch.from_numpy(gguf.quants.dequantize(blocks, dtype))


@functools.cache
def _encoder() -> Any:
    """llama.cpp's ggml_quantize_chunk."""
    function = ctypes.CDLL(str(_place_of("xllamacpp") / "xllamacpp.abi3.so")).ggml_quantize_chunk
    function.restype, pointer, size = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int64
    function.argtypes = (ctypes.c_int, pointer, pointer, size, size, size, pointer)
    return function


@functools.cache
def _auto_gptq() -> Any:
    return _load(_place_of("auto_gptq") / "nn_modules/qlinear/qlinear_cuda.py", "qlinear_cuda")


@functools.cache
def _auto_awq() -> tuple[Any, Any]:
    """(the functions that unpack, the module of a layer)."""
    folder = _place_of("awq")
    for name in ("awq", "awq.utils", "awq.utils.module", "awq.utils.utils"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules["awq.utils.module"].try_import = lambda _: (None, "")  # type: ignore[attr-defined]
    sys.modules["awq.utils.utils"].get_best_device = lambda: "cpu"  # type: ignore[attr-defined]
    packing = _load(folder / "utils/packing_utils.py", "awq.utils.packing_utils")
    return packing, _load(folder / "modules/linear/gemm.py", "awq_gemm")


def _place_of(package: str) -> pathlib.Path:
    """Its folder, without importing it. Raises ImportError."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(f"there is no package {package}")
    return pathlib.Path(spec.submodule_search_locations[0])


def _load(path: pathlib.Path, name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _linear(weight: torch.Tensor) -> torch.nn.Linear:
    n, k = weight.shape
    linear = torch.nn.utils.skip_init(torch.nn.Linear, k, n, bias=False, dtype=weight.dtype)
    linear.weight.data.copy_(weight)
    return linear
