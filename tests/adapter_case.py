"""Random adapters in PEFT's layout, and the merged weights that PEFT's formula makes of them: W + scale B A."""

from __future__ import annotations

import contextlib
import json
import math
import pathlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

from quire import LLM, LoRARequest, SamplingParams

OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True, "enable_lora": True, "dtype": "float32", "device": "cpu", "disable_log_stats": True,
    "num_gpu_blocks_override": 96,
}  # fmt: skip
"""Of an engine whose adapters are compared with merged weights."""
DENSE = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(
    folder: pathlib.Path,
    oracle: transformers.PreTrainedModel,
    targets: Sequence[str] = DENSE,
    *,
    rank: int = 4,
    alpha: float = 8.0,
    seed: int = 0,
    size: float = 0.2,
    **config: Any,
) -> pathlib.Path:
    """An adapter for every module of `oracle` whose name ends in one of targets; returns the folder. target_parameters:
    names of tensors with all experts."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, module in oracle.named_modules():
        if name.rpartition(".")[2] in targets:
            n_in, n_out = shape_of(module)
            own = rank_of(name, rank, config)
            at = f"base_model.model.{name}"
            tensors[f"{at}.lora_A.weight"] = torch.randn(own, n_in, generator=generator) * size
            tensors[f"{at}.lora_B.weight"] = torch.randn(n_out, own, generator=generator) * size
    for name, parameter in oracle.named_parameters():
        if name.rpartition(".")[2] in config.get("target_parameters", ()):
            n_experts, n_out, n_in = parameter.shape
            at = f"base_model.model.{name.rpartition('.')[0]}" + ".base_layer" * name.endswith("gate_up_proj")
            tensors[f"{at}.lora_A.weight"] = torch.randn(n_experts * rank, n_in, generator=generator) * size
            tensors[f"{at}.lora_B.weight"] = torch.randn(n_out, n_experts * rank, generator=generator) * size
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    values = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": list(targets), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps({**values, **config}))
    return folder


def shape_of(module: Any) -> tuple[int, int]:
    """(inputs, outputs); Conv1D has them the other way round."""
    rows, columns = module.weight.shape
    return (rows, columns) if type(module).__name__ == "Conv1D" else (columns, rows)


def rank_of(name: str, rank: int, config: dict[str, Any]) -> int:
    found = [one for key, one in config.get("rank_pattern", {}).items() if re.match(rf"(.*\.)?({key})$", name)]
    return int(found[0]) if found else rank


@contextlib.contextmanager
def merged(oracle: transformers.PreTrainedModel, folder: pathlib.Path) -> Iterator[transformers.PreTrainedModel]:
    """The model with the adapter in its weights."""
    config = json.loads((folder / "adapter_config.json").read_text())
    before = {name: parameter.detach().clone() for name, parameter in oracle.named_parameters()}
    modules = dict(oracle.named_modules())
    with contextlib.ExitStack() as stack, torch.no_grad():
        stack.callback(oracle.load_state_dict, before, strict=False)
        from safetensors.torch import load_file

        tensors = load_file(folder / "adapter_model.safetensors")
        for key, b in tensors.items():
            if ".lora_B." not in key:
                continue
            name = key.removeprefix("base_model.model.").removesuffix(".lora_B.weight")
            found = [v for k, v in config.get("alpha_pattern", {}).items() if re.match(rf"(.*\.)?({k})$", name)]
            alpha, rank = found[0] if found else config["lora_alpha"], b.shape[1]
            scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
            delta = scale * (b.double() @ tensors[key.replace("lora_B", "lora_A")].double())
            if name.endswith((".experts", ".base_layer")):
                of_experts = modules[name.removesuffix(".base_layer")]
                _add_to_experts(of_experts, tensors, key, scale * rank / config["r"])
                continue
            weight = modules[name].weight
            weight.add_((delta.T if type(modules[name]).__name__ == "Conv1D" else delta).to(weight.dtype))
        yield oracle


def _add_to_experts(module: Any, tensors: dict[str, torch.Tensor], key: str, scale: float) -> None:
    """As PEFT's `ParamWrapper` merges a pair for all experts."""
    weight = module.gate_up_proj if ".base_layer." in key else module.down_proj
    b, a = tensors[key].double(), tensors[key.replace("lora_B", "lora_A")].double()
    n_experts = len(weight)
    each_a, each_b = a.view(n_experts, -1, a.shape[1]), b.view(len(b), -1, n_experts)
    weight.add_((torch.einsum("ore,eri->eoi", each_b, each_a) * scale).to(weight.dtype))


def check_against(
    llm: LLM,
    oracle: transformers.PreTrainedModel,
    request: LoRARequest | None,
    ids: Sequence[int],
    greedy: SamplingParams,
) -> None:
    """Greedy tokens, and log-probabilities of the prompt `ids` and of them."""
    (output,) = llm.generate([{"prompt_token_ids": [*ids]}], greedy, use_tqdm=False, lora_request=request)
    every = [*ids, *output.outputs[0].token_ids]
    with torch.no_grad():
        logprobs = oracle(torch.tensor([every])).logits[0].log_softmax(-1)
    assert logprobs[len(ids) - 1 : -1].argmax(-1).tolist() == list(output.outputs[0].token_ids)
    found = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
    ours = torch.tensor([line[token].logprob for line, token in zip(found, every[1:], strict=True)])
    theirs = logprobs[:-1].gather(1, torch.tensor(every[1:])[:, None])[:, 0]
    assert (ours - theirs).abs().max() <= 2e-3
