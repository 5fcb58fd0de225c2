"""Adapters of an engine of two ranks say what they say with one, whether these share layers, are stages, or have
sequences of their own; they come and go while it runs, on all ranks."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
import torch
import transformers
from adapter_case import check_against, merged, write_adapter
from family_cases import CASES, IDS, random_checkpoint
from rank_cases import SIZE
from safetensors.torch import load_file, save_file

from quire import LLM, LoRARequest, SamplingParams
from quire.core.errors import ConfigError, LoadError

GREEDY = SamplingParams(temperature=0, max_tokens=12, logprobs=0, ignore_eos=True, detokenize=False)
WITH_PROMPT = SamplingParams(temperature=0, max_tokens=6, logprobs=0, prompt_logprobs=0, detokenize=False)
OPTIONS: dict[str, Any] = {
    **SIZE, "skip_tokenizer_init": True, "enable_sleep_mode": True, "max_model_len": 64, "enable_lora": True,
    "max_loras": 2, "max_cpu_loras": 3,
}  # fmt: skip
NAMES = "-ab-cab"
Answer = tuple[tuple[int, ...], list[float]]


def answers(llm: LLM, folder: pathlib.Path, names: str) -> list[Answer]:
    """Tokens, and their log-probabilities, of requests in one batch; '-': without an adapter."""
    requests = [None if one == "-" else LoRARequest(one, 1, str(folder / one)) for one in names]
    prompts = [{"prompt_token_ids": [*IDS, place]} for place in range(len(names))]
    outputs = [one.outputs[0] for one in llm.generate(prompts, GREEDY, use_tqdm=False, lora_request=requests)]
    return [
        (tuple(one.token_ids), [line[t].logprob for line, t in zip(one.logprobs, one.token_ids, strict=True)])
        for one in outputs
    ]


def tokens(found: list[Answer]) -> list[tuple[int, ...]]:
    return [one for one, _ in found]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, transformers.PreTrainedModel]:
    """A model, and adapters of all its layers; but `c` is of the last one alone."""
    folder = tmp_path_factory.mktemp("models")
    family, fields = CASES["mimo"]
    oracle = random_checkpoint(folder / "model", family, **fields)
    for seed, name in enumerate("abc"):
        write_adapter(folder / name, oracle, seed=seed, size=0.15)
    write_adapter(folder / "large", oracle, rank=17)
    file, last = folder / "c" / "adapter_model.safetensors", f".layers.{oracle.config.num_hidden_layers - 1}."
    save_file({name: tensor for name, tensor in load_file(file).items() if last in name}, file)
    return folder, oracle


@pytest.fixture(scope="module")
def folder(made: tuple[pathlib.Path, transformers.PreTrainedModel]) -> pathlib.Path:
    return made[0]


@pytest.fixture(scope="module")
def expected(folder: pathlib.Path) -> list[tuple[int, ...]]:
    """What one rank says."""
    one = LLM(str(folder / "model"), **OPTIONS)
    found = tokens(answers(one, folder, NAMES))
    one.shutdown()
    assert len(set(found)) == len(NAMES), "prompts and adapters differ"
    return found


@pytest.mark.parametrize("kind", ["tensor", "pipeline", "data"])
def test_two_ranks_say_what_one_says(
    kind: str,
    made: tuple[pathlib.Path, transformers.PreTrainedModel],
    expected: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, oracle = made
    llm = LLM(str(folder / "model"), **OPTIONS, **{f"{kind}_parallel_size": 2})
    try:
        (alone,) = answers(llm, folder, "a")  # with `-dp` a step in which the other rank has no rows puts it
        assert alone[0] == tokens(answers(llm, folder, "aaaaaa"))[0]
        mixed = answers(llm, folder, NAMES)
        assert tokens(mixed) == expected
        assert answers(llm, folder, "-") == mixed[:1], "the model's own requests keep their bits"
        for name in "ac":
            with merged(oracle, folder / name) as model:
                check_against(llm, model, LoRARequest(name, 1, str(folder / name)), IDS, WITH_PROMPT)
        check_loading(llm, folder, monkeypatch)
        llm.sleep(2)
        llm.wake_up()
        assert tokens(answers(llm, folder, NAMES)) == expected
    finally:
        llm.shutdown()


def test_rows_take_their_adapters_to_experts_of_other_ranks(tmp_path: pathlib.Path) -> None:
    """Sequences are divided and experts too: what rank 1 holds is adapted for rows of rank 0."""
    family, fields = CASES["qwen3_moe"]
    oracle = random_checkpoint(tmp_path / "model", family, **fields)
    for seed, name in enumerate("abc"):
        write_expert_adapter(tmp_path / name, oracle, seed)
    options = OPTIONS | {"lora_experts": True}
    one = LLM(str(tmp_path / "model"), **options)
    expected = answers(one, tmp_path, NAMES)
    one.shutdown()
    assert len(set(tokens(expected))) == len(NAMES), "prompts and adapters differ"
    two = LLM(str(tmp_path / "model"), **options, data_parallel_size=2, enable_expert_parallel=True)
    try:
        for _ in range(2):
            found = answers(two, tmp_path, NAMES)
            assert tokens(found) == tokens(expected)
            for (_, got), (_, wanted) in zip(found, expected, strict=True):
                assert got == pytest.approx(wanted, abs=1e-4)
    finally:
        two.shutdown()


def write_expert_adapter(folder: pathlib.Path, oracle: transformers.PreTrainedModel, seed: int) -> None:
    """Of both products of each expert, in PEFT's layout."""
    made, config, rank = torch.Generator().manual_seed(seed), oracle.config, 4
    hidden, inner = config.hidden_size, config.moe_intermediate_size
    shapes = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    tensors = {}
    for layer in range(config.num_hidden_layers):
        for expert in range(config.num_experts):
            for name, (n, k) in shapes.items():
                at = f"base_model.model.model.layers.{layer}.mlp.experts.{expert}.{name}"
                tensors[f"{at}.lora_A.weight"] = torch.randn(rank, k, generator=made)
                tensors[f"{at}.lora_B.weight"] = torch.randn(n, rank, generator=made) * 0.3
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    said = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_modules": list(shapes)}
    (folder / "adapter_config.json").write_text(json.dumps(said))


def check_loading(llm: LLM, folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What no rank reads, and what only one does, is not there; the engine goes on."""
    adapters = llm.engine.adapters
    with pytest.raises(ConfigError, match="r = 17 must be"):
        adapters.load("large", str(folder / "large"))
    adapters.unload("c")  # the host keeps three
    own = llm.engine.adapters._reader._own
    with monkeypatch.context() as patch:
        read = own.read_adapter
        patch.setattr(own, "read_adapter", lambda *where: ("another", *read(*where)[1:]))
        with pytest.raises(LoadError, match="rank 1: its folder has changed while ranks read it"):
            adapters.load("c", str(folder / "c"))
    assert [one.name for one in adapters.facts] == ["a", "b"]
    for _ in range(3):
        adapters.load("c", str(folder / "c"))
        adapters.unload("c")
