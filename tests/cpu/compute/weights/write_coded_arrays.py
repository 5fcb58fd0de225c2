"""Writes coded_arrays.safetensors: small matrices as the packages of each coding pack them, and decode them.

    PYTHONPATH=P:. python tests/cpu/compute/weights/write_coded_arrays.py

What P has to hold, `benchmarks/peers/codings.py` says.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.peers import codings
from benchmarks.peers.codings import Written

TARGET = pathlib.Path(__file__).with_name("coded_arrays.safetensors")
N, K = 64, 128


def half() -> torch.Tensor:
    return torch.nn.Linear(K, N, bias=False).half().weight.data


def compressed(bits: int, group: int, symmetric: bool, form: str, kind: str = "int") -> Written:
    args: dict[str, Any] = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    weight = torch.randn(N, K).bfloat16()
    return codings.compressed(weight, form, num_bits=bits, type=kind, symmetric=symmetric, **args)


def gptq(bits: int, group: int, act_order: bool) -> Written:
    weight = half()
    index = (torch.arange(K) // group)[torch.randperm(K)] if act_order else None
    return codings.gptq(weight, bits, group, index)


def normal(seed: int) -> torch.Tensor:
    return torch.randn(N, K, generator=torch.Generator().manual_seed(seed)).bfloat16()


def main() -> None:
    torch.manual_seed(0)
    powers = torch.exp2(torch.arange(N) - N / 2)[:, None].bfloat16()
    with torch.no_grad():
        cases = {
            "packed": compressed(4, 32, True, "pack-quantized"),
            "packed-zeros": compressed(4, 64, False, "pack-quantized"),
            "packed-channel-8": compressed(8, 0, True, "pack-quantized"),
            "int8": compressed(8, 0, True, "int-quantized"),
            "float8": compressed(8, 0, True, "float-quantized", "float"),
            "gptq": gptq(4, 32, act_order=False),
            "gptq-order-2": gptq(2, 32, act_order=True),
            "gptq-8": gptq(8, 64, act_order=False),
            "awq": codings.awq(half(), 64),
            "nf4": codings.nf4(torch.randn(N, 96).bfloat16(), nested=False),
            "nf4-nested": codings.nf4(torch.randn(N, 96).bfloat16(), nested=True),
            "nvfp4": codings.compressed(normal(4), "nvfp4-pack-quantized", "NVFP4"),
            "nvfp4-modelopt": codings.nvfp4_modelopt(normal(5)),
            "mxfp4": codings.compressed(normal(6) * powers, "mxfp4-pack-quantized", "MXFP4"),
        }
    tensors, configs = {}, {}
    for case, (config, stored, decoded) in cases.items():
        configs[case] = json.dumps(config)
        found = {**stored, "decoded": decoded}
        tensors |= {f"{case}|{name}": one.contiguous().clone() for name, one in found.items()}
    save_file(tensors, TARGET, configs)


if __name__ == "__main__":
    main()
