"""Adapters of experts, as PEFT writes them and as each expert's own layers, against what PEFT merges."""

from __future__ import annotations

import contextlib
import json
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from adapter_case import OPTIONS as COMMON
from adapter_case import check_against
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from quire import LLM, LoRARequest, SamplingParams
from quire.compute.adapters.files import read_adapter
from quire.compute.dist.comm import SoloComm
from quire.compute.models.decoder import Decoder
from quire.compute.weights.loader import load_model
from quire.config.engine import EngineConfig
from quire.config.mesh import placed
from quire.config.model import read_arch
from quire.core.errors import ConfigError, LoadError

ARRAYS = pathlib.Path(__file__).with_name("merged_experts.safetensors")
"""Written by `write_merged_arrays.py`."""
with safe_open(ARRAYS, "pt") as file:
    SAID = {case: json.loads(text) for case, text in file.metadata().items()}
IDS = [3, 41, 59, 26, 53, 58, 7, 33, 23, 44, 62, 14, 2, 9]
PROMPT = {"prompt_token_ids": IDS}
GREEDY = SamplingParams(temperature=0, max_tokens=8, logprobs=0, prompt_logprobs=0, ignore_eos=True, detokenize=False)
OPTIONS = COMMON | {"lora_experts": True, "num_gpu_blocks_override": 64, "max_loras": 2}
Tensors = dict[str, torch.Tensor]


def arrays(case: str, kind: str) -> Tensors:
    found = load_file(ARRAYS)
    return {name.split("|")[2]: one for name, one in found.items() if name.startswith(f"{case}|{kind}|")}


def oracle_of(case: str, kind: str) -> transformers.PreTrainedModel:
    """kind: 'base' or 'merged'."""
    said = dict(SAID[case]["model"])
    config = transformers.AutoConfig.for_model(said.pop("model_type"), **said)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.load_state_dict(arrays(case, kind))
    return model


def written(case: str, folder: pathlib.Path) -> None:
    """The model, and its adapter in PEFT's layout and, 'apart', with a pair for each expert's layers."""
    oracle_of(case, "base").save_pretrained(folder / "model")
    write_adapter(folder / "a", arrays(case, "adapter"), SAID[case]["adapter"])


def write_adapter(folder: pathlib.Path, tensors: Tensors, config: dict[str, Any]) -> None:
    folder.mkdir(exist_ok=True)
    save_file({name: one.contiguous() for name, one in tensors.items()}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config))


@contextlib.contextmanager
def engine(folder: pathlib.Path, **options: Any) -> Iterator[LLM]:
    llm = LLM(str(folder / "model"), **{**OPTIONS, **options})
    try:
        yield llm
    finally:
        llm.shutdown()


def check(llm: LLM, oracle: transformers.PreTrainedModel, request: LoRARequest | None) -> None:
    check_against(llm, oracle, request, IDS, GREEDY)


@pytest.mark.parametrize("case", sorted(SAID))
def test_equals_what_peft_merges(case: str, tmp_path: pathlib.Path) -> None:
    written(case, tmp_path)
    with engine(tmp_path) as llm:
        check(llm, oracle_of(case, "merged"), LoRARequest("a", 1, str(tmp_path / "a")))
        check(llm, oracle_of(case, "base"), None)


def apart(tensors: Tensors, n_experts: int) -> Tensors:
    """The same with a pair for each linear layer of each expert, as vLLM reads them too."""
    found = {name: one for name, one in tensors.items() if ".experts." not in name}
    for name, a in tensors.items():
        if ".experts." not in name or ".lora_A." not in name:
            continue
        b = tensors[name.replace("lora_A", "lora_B")]
        is_up = ".base_layer." in name
        at = name.partition(".base_layer.")[0] if is_up else name.partition(".lora_A.")[0]
        each_a, each_b = a.view(n_experts, -1, a.shape[1]), b.view(len(b), -1, n_experts)
        layers = ("w1", "w3") if is_up else ("w2",)
        for expert in range(n_experts):
            for layer, own in zip(layers, each_b[..., expert].chunk(len(layers)), strict=True):
                to = f"{at.replace('.mlp.', '.block_sparse_moe.')}.{expert}.{layer}"
                found |= {f"{to}.lora_A.weight": each_a[expert].clone(), f"{to}.lora_B.weight": own.clone()}
    return found


def test_layers_of_each_expert_may_have_their_own(tmp_path: pathlib.Path) -> None:
    """Under the checkpoint's names; with and without others they leave the model's own requests alone."""
    written("both", tmp_path)
    config = {**SAID["both"]["adapter"], "target_parameters": None, "target_modules": ["q_proj", "w1", "w2", "w3"]}
    tensors = apart(arrays("both", "adapter"), 4)
    write_adapter(tmp_path / "b", tensors, config)
    some = {name: one for name, one in tensors.items() if ".experts." not in name or ".experts.2." in name}
    write_adapter(tmp_path / "c", some, config)
    names = ("a", "b", "c", None)
    requests = [None if name is None else LoRARequest(name, 1, str(tmp_path / name)) for name in names]

    def run(some: list[LoRARequest | None]) -> list[Any]:
        params = SamplingParams(temperature=0.8, seed=5, max_tokens=10, logprobs=0, detokenize=False)
        made = [one.outputs[0] for one in llm.generate([PROMPT] * len(some), params, False, some)]
        return [[line[t].logprob for line, t in zip(one.logprobs, one.token_ids, strict=True)] for one in made]

    with engine(tmp_path, max_loras=3) as llm:
        check(llm, oracle_of("both", "merged"), requests[1])
        alone = [run([one])[0] for one in requests]
        assert run([*requests, None, *requests[::-1]]) == [*alone, alone[3], *alone[::-1]]
        assert alone[0] == alone[1] and alone[2] not in (alone[1], alone[3])
    with engine(tmp_path, enable_lora=False, lora_experts=False) as llm:
        assert run([None]) == alone[3:], "its bits are those of an engine without adapters"


def model_of(folder: pathlib.Path, rank: int, size: int) -> Decoder:
    """A rank's part, with whole experts."""
    comm = SoloComm()
    comm.rank, comm.size = rank, size
    config = EngineConfig(model=str(folder), tensor_parallel_size=size, enable_expert_parallel=size > 1)
    arch = placed(read_arch(folder), config)
    return load_model(folder, arch, dtype=torch.float32, device=torch.device("cpu"), max_model_len=64, comm=comm)


@pytest.mark.parametrize("is_apart", [False, True])
def test_a_rank_keeps_nothing_of_experts_that_it_does_not_hold(is_apart: bool, tmp_path: pathlib.Path) -> None:
    """Nor memory that they share with others; what is wrong with theirs is seen by all."""
    written("both", tmp_path)
    config, tensors = SAID["both"]["adapter"], arrays("both", "adapter")
    if is_apart:
        config = {**config, "target_parameters": None, "target_modules": ["q_proj", "w1", "w2", "w3"]}
        tensors = apart(tensors, 4)
    write_adapter(tmp_path / "a", tensors, config)
    models = [model_of(tmp_path / "model", *where) for where in ((0, 1), (0, 2), (1, 2))]
    whole, *ranks = [read_adapter(str(tmp_path / "a"), "", one, 8, with_experts=True) for one in models]
    of_experts = {name for name in whole.pairs if ".experts." in name}
    held = [of_experts & set(one.pairs) for one in ranks]
    assert held[0] | held[1] == of_experts and len(held[0]) == len(held[1]) == len(of_experts) // 2
    for rank, names in zip(ranks, held, strict=True):
        assert (rank.rank, rank.content_id) == (whole.rank, whole.content_id)
        for name in names:
            for own, one in ((rank.pairs[name].a, whole.pairs[name].a), (rank.pairs[name].b, whole.pairs[name].b)):
                assert torch.equal(own, one)
    kept = [one for name in held[0] for one in (ranks[0].pairs[name].a, ranks[0].pairs[name].b)]
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in kept}
    assert sum(storages.values()) <= sum(one.nbytes for one in kept)
    name = next(one for one in tensors if ".experts." in one and ".lora_A." in one)
    tensors[name][0, 0] = torch.nan
    write_adapter(tmp_path / "a", tensors, config)
    for one in models:
        with pytest.raises(LoadError, match="NaN"):
            read_adapter(str(tmp_path / "a"), "", one, 8, with_experts=True)


def _config(**values: Any) -> Any:
    return lambda config, _: config.update(values)


def _cut(config: dict[str, Any], tensors: Tensors) -> None:
    for name in [name for name in tensors if name.endswith("experts.lora_B.weight")]:
        tensors[name] = tensors[name][:-1]


def _half(config: dict[str, Any], tensors: Tensors) -> None:
    for name in [name for name in tensors if name.endswith("experts.lora_B.weight")]:
        del tensors[name]


BAD: dict[str, tuple[Any, str]] = {
    "another shape": (_cut, r"experts' has shapes .*'B': \(31, 16\).*down_proj: .*'B': \(32, 16\)"),
    "another rank": (_config(r=3), r"has shapes .* imply .*'A': \(12, 32\)"),
    "half of a pair": (_half, "has no lora_B"),
    "no such tensor": (_config(target_parameters=["experts.gate_up_proj", "experts.nix"]), "has shapes|nothing for"),
    "names that are none": (_config(target_parameters=[3]), "must be a list of names"),
}


def test_what_does_not_fit_is_refused(tmp_path: pathlib.Path) -> None:
    written("both", tmp_path)
    with engine(tmp_path) as llm:
        for change, words in BAD.values():
            config, tensors = dict(SAID["both"]["adapter"]), arrays("both", "adapter")
            change(config, tensors)
            write_adapter(tmp_path / "bad", tensors, config)
            with pytest.raises((LoadError, ConfigError), match=words):
                llm.engine.adapters.load("bad", str(tmp_path / "bad"))
    with engine(tmp_path, lora_experts=False) as llm:
        with pytest.raises(ConfigError, match=r"target_parameters .* engines with --lora-experts"):
            llm.engine.adapters.load("a", str(tmp_path / "a"))
        write_adapter(tmp_path / "b", apart(arrays("both", "adapter"), 4), {"peft_type": "LORA", "r": 4})
        with pytest.raises(LoadError, match=r"experts\.\d.*with --lora-experts alone"):
            llm.engine.adapters.load("b", str(tmp_path / "b"))
