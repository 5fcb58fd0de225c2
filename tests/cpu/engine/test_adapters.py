"""Adapters through `LLM`, against transformers with PEFT's merged weights; what keeps them apart; how they come."""

from __future__ import annotations

import gc
import json
import math
import os
import pathlib
import random
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from adapter_case import DENSE, OPTIONS, check_against, merged, write_adapter
from family_cases import IDS, checkpoint_of, random_checkpoint
from safetensors.torch import load_file, save_file

from quire import LLM, LoRARequest, SamplingParams
from quire.compute.adapters.host import HostAdapters
from quire.compute.models.decoder import Decoder
from quire.config.engine import EngineConfig
from quire.config.model import read_arch
from quire.config.resolve import EngineLimits
from quire.core.errors import ConfigError, InvalidParameter, LoadError, QuireError, RequestError
from quire.core.files import read_regular
from quire.engine import build
from quire.engine.capacity import size_pool
from quire.planner.adapters import kept_bytes

N_NEW = 12
GREEDY = SamplingParams(temperature=0, max_tokens=N_NEW, logprobs=0, prompt_logprobs=0, detokenize=False)
PROMPT = {"prompt_token_ids": IDS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def oracle(folder: pathlib.Path) -> transformers.PreTrainedModel:
    made = random_checkpoint(folder / "model", "Llama")
    write_adapter(folder / "a", made)
    write_adapter(folder / "b", made, ("q_proj", "v_proj", "down_proj"), rank=8, seed=1, use_rslora=True)
    write_adapter(
        folder / "c", made, ("k_proj", "up_proj", "o_proj"), rank=3, alpha=5.0, seed=2,
        rank_pattern={"k_proj": 7, "layers.1.self_attn.o_proj": 2}, alpha_pattern={r"^model\.layers\.0\..*up_proj": 9},
    )  # fmt: skip
    return made


@pytest.fixture(scope="module")
def llm(folder: pathlib.Path, oracle: transformers.PreTrainedModel) -> Iterator[LLM]:
    made = LLM(str(folder / "model"), **OPTIONS, max_loras=2, max_cpu_loras=2)
    yield made
    made.shutdown()


def named(folder: pathlib.Path, *names: str | None) -> list[LoRARequest | None]:
    return [None if name is None else LoRARequest(name, 1, str(folder / name)) for name in names]


def tokens(llm: LLM, requests: list[LoRARequest | None], params: SamplingParams = GREEDY) -> list[tuple[int, ...]]:
    outputs = llm.generate([PROMPT] * len(requests), params, use_tqdm=False, lora_request=requests)
    return [tuple(one.outputs[0].token_ids) for one in outputs]


def check(llm: LLM, oracle: transformers.PreTrainedModel, request: LoRARequest | None) -> None:
    check_against(llm, oracle, request, IDS, GREEDY)


@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_equals_merged_weights(llm: LLM, oracle: transformers.PreTrainedModel, folder: pathlib.Path, name: str) -> None:
    (request,) = named(folder, name)
    with merged(oracle, folder / name) as model:
        check(llm, model, request)
    check(llm, oracle, None)


def test_fifty_random_ones_equal_merged_weights(
    llm: LLM, oracle: transformers.PreTrainedModel, tmp_path: pathlib.Path
) -> None:
    chance = random.Random(0)
    for number in range(50):
        targets, rank = chance.sample(DENSE, chance.randint(1, len(DENSE))), chance.randint(1, 16)
        more = {"use_rslora": chance.random() < 0.5, "alpha": chance.uniform(0.5, 16.0), "size": 0.1}
        name = f"random{number}"
        write_adapter(tmp_path / name, oracle, targets, rank=rank, seed=number, **more)
        with merged(oracle, tmp_path / name) as model:
            check(llm, model, LoRARequest(name, 1, str(tmp_path / name)))


FAMILIES = {
    "gpt2": ("c_attn", "c_proj", "c_fc"),
    "gpt_neox": ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),
    "phi3": ("qkv_proj", "gate_up_proj", "down_proj"),
    "deepseek_v3": ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_families_have_their_own_names_and_orders(family: str, tmp_path: pathlib.Path) -> None:
    oracle = checkpoint_of(family, tmp_path / "model")
    write_adapter(tmp_path / "a", oracle, FAMILIES[family], seed=3)
    llm = LLM(str(tmp_path / "model"), **OPTIONS)
    with merged(oracle, tmp_path / "a") as model:
        check(llm, model, LoRARequest("a", 1, str(tmp_path / "a")))
    llm.shutdown()


def test_mixed_batches_equal_each_alone_bit_for_bit(llm: LLM, folder: pathlib.Path) -> None:
    """Three adapters with two places, sampled; the model's own requests run beside them as they do without."""
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=N_NEW, logprobs=0, detokenize=False)
    requests = named(folder, None, "a", "b", None, "c", "a", "c")

    def run(some: list[LoRARequest | None]) -> list[Any]:
        outputs = llm.generate([PROMPT] * len(some), params, use_tqdm=False, lora_request=some)
        made = [one.outputs[0] for one in outputs]
        return [[line[t].logprob for line, t in zip(one.logprobs, one.token_ids, strict=True)] for one in made]

    together, alone = run(requests), [run([one])[0] for one in requests]
    assert together == alone
    assert len({str(one) for one in together}) == 4


def test_pages_of_another_content_under_the_same_name_are_not_found(
    llm: LLM, oracle: transformers.PreTrainedModel, folder: pathlib.Path
) -> None:
    place = folder / "renewed"
    write_adapter(place, oracle, seed=11)
    first = tokens(llm, [LoRARequest("renewed", 1, str(place))])
    write_adapter(place, oracle, seed=12)
    assert tokens(llm, [LoRARequest("renewed")]) == first, "it is what it was until it is loaded again"
    again = LoRARequest("renewed", 1, str(place), load_inplace=True)
    (output,) = llm.generate([PROMPT], GREEDY, use_tqdm=False, lora_request=again)
    assert output.num_cached_tokens == 0
    with merged(oracle, place) as model:
        check(llm, model, LoRARequest("renewed"))
    (output,) = llm.generate([PROMPT], SamplingParams(max_tokens=1, detokenize=False), False, LoRARequest("renewed"))
    assert output.num_cached_tokens > 0


def test_one_name_is_one_folder_in_a_call(llm: LLM, folder: pathlib.Path) -> None:
    both = [LoRARequest("one", 1, str(folder / name)) for name in "ab"]
    with pytest.raises(InvalidParameter, match=r"lora_path .* the same for all prompts that name the adapter 'one'"):
        tokens(llm, [*both])
    with pytest.raises(InvalidParameter, match="the name of an adapter that is loaded"):
        tokens(llm, [LoRARequest("one")])
    assert [*tokens(llm, both[:1]), *tokens(llm, both[1:])] == tokens(llm, named(folder, "a", "b"))


def test_a_stream_has_the_adapter_that_it_began_with(llm: LLM, folder: pathlib.Path) -> None:
    request = llm._prepare(PROMPT, GREEDY, adapter=LoRARequest("late", 1, str(folder / "a")))
    tokens(llm, [LoRARequest("late", 1, str(folder / "b"))])
    with pytest.raises(RequestError, match="another adapter has the name 'late'"):
        llm._finished([request], use_tqdm=False)


def test_what_the_host_does_not_keep_is_read_again(llm: LLM, folder: pathlib.Path) -> None:
    expected = {name: tokens(llm, named(folder, name)) for name in "abc"}  # more than max_cpu_loras
    for name in "cabbca":
        assert tokens(llm, [LoRARequest(name)]) == expected[name]
    assert len(llm.engine.adapters._kept) <= 2


@pytest.mark.parametrize("level", [1, 2])
def test_adapters_come_back_after_sleep(folder: pathlib.Path, oracle: transformers.PreTrainedModel, level: int) -> None:
    """In other places than before; the model is let go of."""
    llm = LLM(str(folder / "model"), **OPTIONS, max_loras=2, enable_sleep_mode=True)
    before = tokens(llm, named(folder, "a", "b", None))
    model = weakref.ref(llm.engine.executor.worker.model)
    llm.sleep(level)
    gc.collect()
    assert (model() is None) == (level == 2)
    llm.wake_up()
    assert tokens(llm, named(folder, "b")) == before[1:2] and tokens(llm, named(folder, "a", None)) == before[::2]
    llm.shutdown()


def test_deterministic_requests_have_the_same_bits_in_any_company(llm: LLM, folder: pathlib.Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=N_NEW, deterministic=True, detokenize=False)
    alone = [tokens(llm, [one], params)[0] for one in named(folder, "a", None)]
    assert tokens(llm, named(folder, "b", "a", None, "b"), params)[1:3] == alone


Change = Callable[[dict[str, Any], dict[str, torch.Tensor]], None]


def _tensor(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    def apply(_: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        key = f"base_model.model.model.layers.0.self_attn.q_proj.{name}.weight"
        tensors[key] = change(tensors[key]).contiguous()

    return apply


def _config(**values: Any) -> Change:
    return lambda config, _: config.update(values)


def _renamed(old: str, new: str) -> Change:
    def apply(_: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        for key in [key for key in tensors if old in key]:
            tensors[key.replace(old, new)] = tensors.pop(key)

    return apply


BAD: dict[str, tuple[Change, str]] = {
    "a huge rank": (_config(r=100_000), "r = 100000 must be an integer between 1 and 16, the most is 256: merge it"),
    "a rank above the limit": (_config(r=32), "r = 32 must be an integer .* 16: start with --max-lora-rank 32"),
    "no rank": (_config(r=0), "r = 0 must be an integer between 1 and 16$"),
    "a huge tensor": (_tensor("lora_A", lambda a: torch.zeros(100_000, 64)), "shape|larger than"),
    "another shape": (_tensor("lora_B", lambda b: b[:-1]), r"shape \(63, 4\); .* imply \(64, 4\)"),
    "NaN": (_tensor("lora_A", lambda a: a * math.nan), "NaN or infinite"),
    "infinity": (_tensor("lora_B", lambda b: b / 0), "NaN or infinite"),
    "integers": (_tensor("lora_A", lambda a: a.to(torch.int8)), "dtype I8"),
    "half of a pair": (_renamed("0.self_attn.q_proj.lora_A", "0.self_attn.q_proj.lora_magnitude_vector"), "DoRA"),
    "no such layer": (_renamed("layers.0.", "layers.7."), "no such linear layer"),
    "a head": (_renamed("model.model.layers.0.self_attn.q_proj.", "model.lm_head."), "embedding and the head"),
    "other names": (_renamed("lora_A", "lora_C"), "none of a LoRA adapter"),
    "not among the targets": (_config(target_modules=["q_proj"]), "none of target_modules"),
    "targets without tensors": (_config(target_modules=[*DENSE, "extra"]), "nothing for 'extra'"),
    "DoRA": (_config(use_dora=True), "use_dora = True"),
    "whole layers": (_config(modules_to_save=["lm_head"]), "modules_to_save"),
    "biases": (_config(bias="all"), "biases of an adapter"),
    "another method": (_config(peft_type="IA3"), "only 'LORA'"),
    "weights that PiSSA changes": (_config(init_lora_weights="pissa_niter_4"), "changes the base's weights"),
    "weights that LoRA-GA changes": (_config(init_lora_weights="lora_ga"), "changes the base's weights"),
    "blocks": (_config(use_bdlora={"nblocks": 2}), "use_bdlora = .* diagonal blocks are not applied"),
    "a base that KaSA changes": (_config(kasa_config={"beta": 1e-4}), "kasa_config = .* changes the base's weights"),
    "a pattern that takes hours": (_config(alpha_pattern={"(a+)+b": 3}), "repetitions"),
    "an infinite scale": (_config(lora_alpha=1e300), "at most a million"),
    "a scale beyond the dtype": (
        lambda config, tensors: (config.update(lora_alpha=1e6), _tensor("lora_B", lambda b: b * 1e35)(config, tensors)),
        r"lora_B with its scale of 'model\S*q_proj' reaches inf, and float32 ends at 3\.40282e\+38: lower lora_alpha",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_adapters_are_refused_by_name(
    llm: LLM, oracle: transformers.PreTrainedModel, tmp_path: pathlib.Path, what: str
) -> None:
    write_adapter(tmp_path, oracle)
    change, words = BAD[what]
    path = tmp_path / "adapter_config.json"
    config, tensors = json.loads(path.read_text()), load_file(tmp_path / "adapter_model.safetensors")
    change(config, tensors)
    path.write_text(json.dumps(config))
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    with pytest.raises((LoadError, ConfigError), match=words):
        llm.generate([PROMPT], GREEDY, use_tqdm=False, lora_request=LoRARequest("bad", 1, str(tmp_path)))
    with pytest.raises(InvalidParameter, match="bad"):
        tokens(llm, [LoRARequest("bad")])


OTHERS = {
    "model.layers.1.mlp.gate": "adapters of this matrix are not applied: routers",
    "model.layers.0.self_attn.kv_b_proj": "adapters of this matrix are not applied: routers, and what makes keys and",
    "model.layers.1.mlp.experts.0.up_proj": "adapters of experts",
    "model.embed_tokens": "embedding and the head",
    "lm_head": "embedding and the head",
    "model.layers.1.mlp.nothing": "no such linear layer",
}


def test_matrices_that_are_not_adapted_are_refused_with_the_reason(tmp_path: pathlib.Path) -> None:
    """Of a model with latent attention and experts."""
    oracle = checkpoint_of("deepseek_v3", tmp_path / "model")
    llm = LLM(str(tmp_path / "model"), **OPTIONS)
    for module, said in OTHERS.items():
        write_adapter(tmp_path / "a", oracle, ("q_a_proj",))
        path = tmp_path / "a" / "adapter_model.safetensors"
        tensors = {f"base_model.model.{module}.lora_{kind}.weight": torch.ones(4, 4) for kind in "AB"}
        save_file(load_file(path) | tensors, path)
        with pytest.raises(LoadError, match=rf"{module}\.lora_[AB]\.weight': .*{said}"):
            llm.engine.adapters.load("x", str(tmp_path / "a"))
    llm.shutdown()


def test_paths_stay_inside_the_root(llm: LLM, oracle: transformers.PreTrainedModel, folder: pathlib.Path) -> None:
    adapters, root = llm.engine.adapters, folder / "root"
    write_adapter(root / "good", oracle)
    write_adapter(folder / "outside", oracle)
    write_adapter(root / "linked", oracle)
    (root / "linked" / "adapter_model.safetensors").unlink()
    os.symlink(folder / "outside" / "adapter_model.safetensors", root / "linked" / "adapter_model.safetensors")
    os.symlink(folder / "outside", root / "link")
    os.symlink(root / "loop", root / "loop")
    os.mkfifo(root / "good" / "pipe")
    for path in ("../outside", "link", "linked", str(folder / "outside"), "/etc", "loop", "nix", "a\0b", "good/pipe"):
        with pytest.raises((ConfigError, LoadError)):
            adapters.load("x", path, str(root))
    assert adapters.load("x", "good", str(root)).rank == 4
    adapters.unload("x")


def test_modules_that_are_left_out(llm: LLM, oracle: transformers.PreTrainedModel, tmp_path: pathlib.Path) -> None:
    """PEFT writes them among the targets too."""
    write_adapter(tmp_path, oracle, ("q_proj",), target_modules=["q_proj", "o_proj"], exclude_modules=["o_proj"])
    assert llm.engine.adapters.load("x", str(tmp_path)).rank == 4
    llm.engine.adapters.unload("x")


def test_a_tilde_is_a_home_where_the_operator_wrote_it(
    llm: LLM, oracle: transformers.PreTrainedModel, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the command line takes it when it looks for the folder; in a request it is a character."""
    monkeypatch.setenv("HOME", str(tmp_path))
    write_adapter(tmp_path / "root" / "good", oracle)
    for path, root in (("~/root/good", ""), ("good", "~/root")):
        assert llm.engine.adapters.load("x", path, root).rank == 4
        llm.engine.adapters.unload("x")
    for path, root in (("~/root/good", str(tmp_path)), ("~nobody-of-this-name/x", "")):
        with pytest.raises(ConfigError, match=r"lora_path = .* cannot be read"):
            llm.engine.adapters.load("x", path, root)


def test_the_configuration_is_read_once(
    llm: LLM, oracle: transformers.PreTrainedModel, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else one that is written meanwhile scales by what its hash does not know of."""
    write_adapter(tmp_path, oracle)
    read: list[str] = []

    def reading(path: pathlib.Path, most: int) -> bytes:
        read.append(path.name)
        return read_regular(path, most)

    monkeypatch.setattr("quire.compute.adapters.files.read_regular", reading)
    monkeypatch.setattr("quire.config.fields.read_regular", reading)
    facts = llm.engine.adapters.load("once", str(tmp_path))
    assert sorted(read) == ["adapter_config.json", "adapter_model.safetensors"]
    (tmp_path / "adapter_config.json").write_text((tmp_path / "adapter_config.json").read_text() + " ")
    assert llm.engine.adapters.load("once", str(tmp_path), in_place=True).content_id != facts.content_id
    llm.engine.adapters.unload("once")


def test_truncated_and_missing_files(llm: LLM, oracle: transformers.PreTrainedModel, tmp_path: pathlib.Path) -> None:
    write_adapter(tmp_path, oracle)
    weights = tmp_path / "adapter_model.safetensors"
    content = weights.read_bytes()
    for size in (0, 7, 100, len(content) // 2, len(content) - 1):
        weights.write_bytes(content[:size])
        with pytest.raises(LoadError):
            llm.engine.adapters.load("x", str(tmp_path))
    weights.unlink()
    with pytest.raises(LoadError, match="cannot read"):
        llm.engine.adapters.load("x", str(tmp_path))


def test_the_memory_equation_has_what_the_host_keeps(
    llm: LLM, oracle: transformers.PreTrainedModel, tmp_path: pathlib.Path
) -> None:
    """To the byte, for one of the largest rank in every matrix."""
    rank = llm.engine.executor.worker.adapters._config.max_lora_rank
    write_adapter(tmp_path, oracle, rank=rank)
    _, found, kept = llm.engine.executor.worker.adapters.read_adapter(str(tmp_path), "")
    n_bytes = sum(one.n_bytes for one in kept.lines)
    assert found == rank and n_bytes == kept_bytes(read_arch(folder_of(llm)), rank, 4)


def test_places_are_no_weights_of_the_model(
    folder: pathlib.Path, oracle: transformers.PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as on a GPU, where they lie beside the model from the start."""
    attach, pools = HostAdapters.attach, list[int]()

    def with_places(self: HostAdapters, model: Decoder, dtype: torch.dtype) -> int:
        return attach(self, model, dtype) + (1 << 20)

    def size(*args: Any) -> tuple[int, EngineLimits]:
        pools.append(args[6])
        return size_pool(*args)

    monkeypatch.setattr(HostAdapters, "attach", with_places)
    monkeypatch.setattr(build, "size_pool", size)
    core, ready = build.build_engine(EngineConfig(model=str(folder / "model"), **OPTIONS))
    n_bytes = core.executor.worker.model.n_bytes  # type: ignore[attr-defined]
    core.shutdown()
    assert ready.model.weight_bytes == n_bytes
    assert pools == [n_bytes + (1 << 20)], "they are taken all the same"


def folder_of(llm: LLM) -> pathlib.Path:
    return pathlib.Path(llm.config.model)


def test_without_adapters_they_are_refused(folder: pathlib.Path, oracle: transformers.PreTrainedModel) -> None:
    with pytest.raises(QuireError, match="enable_lora"):
        LLM(str(folder / "model"), **{**OPTIONS, "enable_lora": False}, lora_modules=["a=/x"])
    with pytest.raises(QuireError, match="max_cpu_loras"):
        LLM(str(folder / "model"), **OPTIONS, max_loras=4, max_cpu_loras=2)
