"""Random checkpoints in each coding that Quire reads: what is stored, and the numbers that it stands for.

Written from the published packings, as in auto_gptq/nn_modules/qlinear (`pack`), awq/modules/linear/gemm.py
(`from_linear`), compressed_tensors, DeepSeek-V3's inference/fp8_cast_bf16.py and transformers' gpt-oss. Numbers are
those of the integers, before any packing.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shutil
from collections.abc import Callable, Mapping
from typing import Any

import torch
from safetensors.torch import load_file, save_file

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
FP8_MAX = 448.0
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
Stored = tuple[dict[str, torch.Tensor], torch.Tensor]
"""(end of a tensor's name → tensor, the numbers that they stand for, float32)."""


@dataclasses.dataclass(frozen=True)
class Format:
    """One coding."""

    config: Mapping[str, Any]
    """quantization_config."""
    store: Callable[[torch.Tensor], Stored]


def rounded(weight: torch.Tensor, bits: int, group: int, symmetric: bool) -> tuple[torch.Tensor, ...]:
    """float32 [n, k] → codes [n, k] from 0, scales [n, groups] of float16, zero points [n, groups]."""
    n, k = weight.shape
    groups = weight.view(n, k // group, group)
    most, middle = (1 << bits) - 1, 1 << bits - 1
    if symmetric:
        scales = (groups.abs().amax(2) / (middle - 1)).half()
        zeros = torch.full_like(scales, middle).int()
    else:
        low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
        scales = ((high - low) / most).half()
        zeros = (-low / scales.float()).round().clamp(0, most).int()
    codes = (groups / scales.float()[:, :, None]).round() + zeros[:, :, None]
    return codes.clamp(0, most).int().view(n, k), scales, zeros


def numbers(
    codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, index: torch.Tensor | None = None
) -> torch.Tensor:
    """What they stand for; index: the group of each input."""
    if index is None:
        index = torch.arange(codes.shape[1]) // (codes.shape[1] // scales.shape[1])
    return (codes - zeros[:, index]).float() * scales.float()[:, index]


def words(values: torch.Tensor, bits: int, order: tuple[int, ...] = ()) -> torch.Tensor:
    """int [r, m] → int32 [r, ceil(m * bits / 32)], along the rows, the lowest bits first."""
    each = 32 // bits
    values = torch.nn.functional.pad(values, (0, -values.shape[1] % each)).view(len(values), -1, each)
    total = torch.zeros(values.shape[:2], dtype=torch.int64)
    for place, source in enumerate(order or range(each)):
        total |= values[:, :, source].long() << bits * place
    return torch.where(total >= 1 << 31, total - (1 << 32), total).int()


def order_of(k: int) -> torch.Tensor:
    """An order of inputs, the same for all matrices that read them, as GPTQ makes it."""
    return torch.randperm(k, generator=torch.Generator().manual_seed(k))


def gptq(bits: int, group: int, *, symmetric: bool = True, act_order: bool = False, less: int = 1) -> Format:
    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": symmetric, "desc_act": act_order}

    def store(weight: torch.Tensor) -> Stored:
        k = weight.shape[1]
        size = k if group == -1 else group
        order = order_of(k) if act_order else torch.arange(k)
        codes, scales, zeros = rounded(weight[:, order], bits, size, symmetric)
        back = order.argsort()
        codes, index = codes[:, back], (torch.arange(k) // size)[back]
        stored = (zeros - less) & (1 << bits) - 1
        tensors = {
            ".qweight": words(codes, bits).t(), ".qzeros": words(stored.t(), bits), ".scales": scales.t(),
            ".g_idx": index.int(),
        }  # fmt: skip
        return tensors, numbers(codes, scales, zeros, index)

    return Format(config | ({} if less else {"checkpoint_format": "gptq_v2"}), store)


def awq(group: int) -> Format:
    def store(weight: torch.Tensor) -> Stored:
        codes, scales, zeros = rounded(weight, 4, group, symmetric=False)
        tensors = {
            ".qweight": words(codes.t(), 4, AWQ_ORDER), ".qzeros": words(zeros.t(), 4, AWQ_ORDER),
            ".scales": scales.t(),
        }  # fmt: skip
        return tensors, numbers(codes, scales, zeros)

    return Format({"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "GEMM"}, store)


def compressed(form: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    """Its quantization_config for all matrices but the head."""
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}}
    return {
        "quant_method": "compressed-tensors", "format": form, "config_groups": groups, "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }  # fmt: skip


def packed(bits: int, group: int, *, symmetric: bool = True, act_order: bool = False) -> Format:
    weights = {
        "num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "group" if group else "channel",
        "group_size": group or None, "actorder": "group" if act_order else None,
    }  # fmt: skip

    def store(weight: torch.Tensor) -> Stored:
        n, k = weight.shape
        size = group or k
        order = order_of(k) if act_order else torch.arange(k)
        codes, scales, zeros = rounded(weight[:, order], bits, size, symmetric)
        scales = scales.bfloat16()
        back = order.argsort()
        codes, index = codes[:, back], (torch.arange(k) // size)[back]
        tensors = {
            ".weight_packed": words(codes, bits), ".weight_scale": scales, ".weight_shape": torch.tensor([n, k]),
        }  # fmt: skip
        if not symmetric:
            tensors[".weight_zero_point"] = words(zeros.t(), bits).t()
        if act_order:
            tensors[".weight_g_idx"] = index.int()
        return tensors, numbers(codes, scales, zeros, index)

    return Format(compressed("pack-quantized", weights), store)


def int8() -> Format:
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}

    def store(weight: torch.Tensor) -> Stored:
        scales = weight.abs().amax(1, keepdim=True) / 127.5
        codes = (weight / scales).round().clamp(-128, 127).to(torch.int8)
        return {".weight": codes, ".weight_scale": scales}, codes.float() * scales

    inputs = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
    return Format(compressed("int-quantized", weights, inputs), store)


def fp8(block: tuple[int, int] | None, *, static: bool = False) -> Format:
    """block: None: one scale a tensor."""

    def store(weight: torch.Tensor) -> Stored:
        n, k = weight.shape
        rows, columns = block or (n, k)
        n_down, n_right = -(-n // rows), -(-k // columns)
        padded = torch.nn.functional.pad(weight, (0, n_right * columns - k, 0, n_down * rows - n))
        scales = padded.view(n_down, rows, n_right, columns).abs().amax((1, 3)) / FP8_MAX
        wide = scales.repeat_interleave(rows, 0)[:n].repeat_interleave(columns, 1)[:, :k]
        codes = (weight / wide).to(torch.float8_e4m3fn)
        tensors = {".weight": codes, ".weight_scale_inv" if block else ".weight_scale": scales if block else scales[0]}
        if static:
            tensors[".input_scale"] = torch.tensor(0.2)
        return tensors, codes.float() * wide

    scheme = {"activation_scheme": "static" if static else "dynamic"}
    sizes = {"weight_block_size": list(block)} if block else {}
    return Format({"quant_method": "fp8", **scheme, **sizes}, store)


def nvfp4(*, modelopt: bool = False) -> Format:
    """Groups of 16 that share an e4m3 scale, and a scale of the tensor: it divides these, or is multiplied by them."""
    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
    inputs = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "dynamic": "local"}

    def store(weight: torch.Tensor) -> Stored:
        n, k = weight.shape
        groups, levels = weight.view(n, -1, 16), torch.tensor(E2M1[:8])
        whole = FP8_MAX * 6 / weight.abs().max()
        whole = 1 / (1 / whole) if modelopt else whole
        local = (groups.abs().amax(2) / 6 * whole).to(torch.float8_e4m3fn)
        scales = local.float() * (1 / whole) if modelopt else local.float() / whole
        near = (groups.abs() / scales[:, :, None]).unsqueeze(3) - levels
        codes = (near.abs().argmin(3) + 8 * (groups < 0)).view(n, k).to(torch.uint8)
        octets = codes[:, 0::2] | codes[:, 1::2] << 4
        tensors = {".weight_packed": octets, ".weight_scale": local, ".weight_global_scale": whole.view(1)}
        if modelopt:
            tensors = {".weight": octets, ".weight_scale": local, ".weight_scale_2": 1 / whole}
            tensors[".input_scale"] = torch.tensor(0.01)
        values = torch.tensor(E2M1)[codes.int()].view_as(groups) * scales[:, :, None]
        return tensors, values.view(n, k)

    if modelopt:
        return Format({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}, store)
    return Format(compressed("nvfp4-pack-quantized", weights, inputs), store)


def mxfp4() -> Format:
    """Groups of 32 that share a power of two, as compressed-tensors has them."""
    weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True}

    def store(weight: torch.Tensor) -> Stored:
        n, k = weight.shape
        groups, levels = weight.view(n, -1, 32), torch.tensor(E2M1[:8])
        exponents = groups.abs().amax(2).log2().floor() - 2
        scales = torch.exp2(exponents)
        near = (groups.abs() / scales[:, :, None]).unsqueeze(3) - levels
        codes = (near.abs().argmin(3) + 8 * (groups < 0)).view(n, k).to(torch.uint8)
        tensors = {
            ".weight_packed": codes[:, 0::2] | codes[:, 1::2] << 4, ".weight_scale": (exponents + 127).to(torch.uint8)
        }  # fmt: skip
        values = torch.tensor(E2M1)[codes.int()].view_as(groups) * scales[:, :, None]
        return tensors, values.view(n, k)

    return Format(compressed("mxfp4-pack-quantized", weights, weights | {"dynamic": True}), store)


FORMATS = {
    "packed-g128": packed(4, 128),
    "packed-g32-zeros": packed(4, 32, symmetric=False),
    "packed-channel": packed(4, 0),
    "packed-order": packed(4, 64, act_order=True),
    "packed-8": packed(8, 32),
    "gptq-g128": gptq(4, 128),
    "gptq-g64-zeros": gptq(4, 64, symmetric=False),
    "gptq-order": gptq(4, 32, symmetric=False, act_order=True),
    "gptq-v2-8": gptq(8, -1, symmetric=True, less=0),
    "awq-g64": awq(64),
    "int8": int8(),
    "fp8-blocks": fp8((128, 128)),
    "fp8-odd-blocks": fp8((96, 80)),
    "fp8-static": fp8(None, static=True),
    "nvfp4": nvfp4(),
    "nvfp4-modelopt": nvfp4(modelopt=True),
    "mxfp4": mxfp4(),
}


def quantise(folder: pathlib.Path, target: pathlib.Path, form: Format, plain: pathlib.Path) -> None:
    """Write a checkpoint of float32 with its projections in a coding, and one of the numbers that these stand for."""
    torch.manual_seed(1)
    found, expected = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        stem = name.removesuffix(".weight")
        if stem.endswith("_proj") and tensor.dim() == 2:
            tensors, values = form.store(tensor.float())
            found |= {stem + end: one.contiguous() for end, one in tensors.items()}
            expected[name] = values.contiguous()
        else:
            found[name] = expected[name] = tensor
    write(folder, target, found, {"quantization_config": dict(form.config)})
    write(folder, plain, expected, {})


def mxfp4_experts(folder: pathlib.Path, target: pathlib.Path, plain: pathlib.Path) -> None:
    """As `quantise`, of a gpt-oss: all experts of a layer in one tensor of blocks and one of exponents."""
    torch.manual_seed(1)
    found, expected = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            found[name] = expected[name] = tensor
            continue
        n_experts, k, n = tensor.shape
        blocks = torch.randint(0, 256, (n_experts, n, k // 32, 16), dtype=torch.uint8)
        exponents = torch.randint(120, 124, (n_experts, n, k // 32), dtype=torch.uint8)
        found |= {f"{name}_blocks": blocks, f"{name}_scales": exponents}
        levels = torch.tensor(E2M1)[torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(3).int()]
        numbers_of = levels * torch.exp2(exponents.float() - 127)[..., None]
        expected[name] = numbers_of.flatten(2).transpose(1, 2).contiguous()
    write(folder, target, found, {"quantization_config": {"quant_method": "mxfp4"}})
    write(folder, plain, expected, {})


def write(folder: pathlib.Path, target: pathlib.Path, tensors: dict[str, torch.Tensor], more: dict[str, Any]) -> None:
    """A copy of a checkpoint with other tensors, and more in its config.json."""
    shutil.copytree(folder, target, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | more))
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
