"""Checkpoints that `quire merge` writes, against what PEFT merges, and read by transformers and Quire."""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from adapter_case import merged, write_adapter
from family_cases import IDS, random_checkpoint
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from quire.cli.main import main
from quire.compute.adapters.merge import Merge
from quire.compute.quantize.folder import Folder
from quire.compute.weights.loader import fits
from quire.config.model import read_arch
from quire.core.errors import ConfigError, LoadError

ARRAYS = pathlib.Path(__file__).with_name("merged_arrays.safetensors")
"""Written by `write_merged_arrays.py`."""
with safe_open(ARRAYS, "pt") as file:
    SAID = {case: json.loads(text) for case, text in file.metadata().items()}
Tensors = dict[str, torch.Tensor]


def arrays(case: str, kind: str) -> Tensors:
    found = load_file(ARRAYS)
    return {name.split("|")[2]: one for name, one in found.items() if name.startswith(f"{case}|{kind}|")}


def written(case: str, folder: pathlib.Path, dtype: torch.dtype = torch.float32, n_files: int = 1) -> pathlib.Path:
    """The model of a case and, inside its folder, the adapter."""
    base = {name: one.to(dtype) for name, one in arrays(case, "base").items()}
    if SAID[case]["tied"]:
        base.pop("lm_head.weight")
    (folder / "adapter").mkdir(parents=True)
    if n_files == 1:
        save_file(base, folder / "model.safetensors", {"format": "pt"})
    else:
        index = {name: f"model-{number % n_files}.safetensors" for number, name in enumerate(base)}
        for home in set(index.values()):
            save_file({name: one for name, one in base.items() if index[name] == home}, folder / home)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (folder / "config.json").write_text(json.dumps(SAID[case]["model"]))
    save_file(arrays(case, "adapter"), folder / "adapter" / "adapter_model.safetensors")
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(SAID[case]["adapter"]))
    return folder


def tensors_of(folder: pathlib.Path) -> Tensors:
    return {name: one for path in folder.glob("*.safetensors") for name, one in load_file(path).items()}


@pytest.mark.parametrize("n_files", [1, 3])
@pytest.mark.parametrize("case", sorted(SAID))
def test_is_what_peft_merges(case: str, n_files: int, tmp_path: pathlib.Path) -> None:
    folder, out = written(case, tmp_path / "model", n_files=n_files), tmp_path / "out"
    assert main(["merge", str(folder), str(folder / "adapter"), str(out)]) == 0
    found, expected, base = tensors_of(out), arrays(case, "merged"), arrays(case, "base")
    assert len(list(out.glob("*.safetensors"))) == n_files and fits(out, read_arch(out))[0] == n_files
    changed = [name for name in base if not torch.equal(base[name], expected[name])]
    assert len(changed) >= 4
    for name, one in found.items():
        if name in changed:
            torch.testing.assert_close(one, expected[name], rtol=1e-5, atol=1e-6)
        else:
            assert torch.equal(one, base[name]), name
    assert found.keys() == {name for name in base if name != "lm_head.weight" or not SAID[case]["tied"]}


def test_is_rounded_once(tmp_path: pathlib.Path) -> None:
    folder = written("dora", tmp_path / "model", torch.bfloat16)
    merge = Merge(folder, read_arch(folder), str(folder / "adapter"))
    (found,) = list(merge)
    a, b, m = (
        arrays("dora", "adapter")[f"base_model.model.model.layers.0.mlp.up_proj.lora_{kind}"].double()
        for kind in ("A.weight", "B.weight", "magnitude_vector")
    )
    name = "model.layers.0.mlp.up_proj.weight"
    whole = arrays("dora", "base")[name].bfloat16().double() + 1.5 * b @ a
    expected = m[:, None] * whole / whole.norm(dim=1, keepdim=True)
    assert found[name].dtype == torch.bfloat16
    assert float((found[name].double() - expected).abs().max() / expected.abs().max()) < 2**-8


@pytest.mark.parametrize("family", ["Llama", "Phi3"])
def test_transformers_and_quire_read_it(family: str, tmp_path: pathlib.Path) -> None:
    from quire import LLM, SamplingParams

    oracle = random_checkpoint(tmp_path / "model", family)
    targets = ("q_proj", "down_proj", "o_proj") if family == "Llama" else ("qkv_proj", "gate_up_proj")
    write_adapter(tmp_path / "a", oracle, targets, use_rslora=True, rank=6, rank_pattern={targets[0]: 3})
    assert main(["merge", str(tmp_path / "model"), str(tmp_path / "a"), str(tmp_path / "out")]) == 0
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    with merged(oracle, tmp_path / "a") as model, torch.no_grad():
        logits = model(torch.tensor([IDS])).logits[0]
        torch.testing.assert_close(read(torch.tensor([IDS])).logits[0], logits, rtol=1e-4, atol=1e-4)
    llm = LLM(
        str(tmp_path / "out"), dtype="float32", device="cpu", skip_tokenizer_init=True, num_gpu_blocks_override=32,
        disable_log_stats=True,
    )  # fmt: skip
    (output,) = llm.generate(
        [IDS], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False), use_tqdm=False
    )
    llm.shutdown()
    ours = torch.tensor([line[token].logprob for line, token in zip(output.prompt_logprobs[1:], IDS[1:], strict=True)])
    theirs = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(IDS[1:])[:, None])[:, 0]
    assert (ours - theirs).abs().max() < 2e-3


def change(tensors: Tensors, old: str, new: str) -> None:
    for name in [name for name in tensors if old in name]:
        tensors[name.replace(old, new)] = tensors.pop(name)


UP = "base_model.model.model.layers.0.mlp.up_proj.lora_"
BAD: dict[str, tuple[Callable[[dict[str, Any], Tensors], object], str]] = {
    "no magnitude": (lambda _, one: one.pop(f"{UP}magnitude_vector"), "has lora_A and lora_B; with use_dora = true"),
    "a magnitude without DoRA": (lambda one, _: one.update(use_dora=False), "with use_dora = false"),
    "another shape": (lambda _, one: one.update({f"{UP}magnitude_vector": torch.ones(7)}), r"imply \(24,\)"),
    "another rank": (lambda one, _: one.update(r=5), r"lora_A of .* imply \(5, \d+\)"),
    "no such layer": (lambda _, one: change(one, "layers.0.", "layers.7."), "the checkpoint has no such matrix"),
    "no target": (lambda one, _: one.update(target_modules=["q_proj"]), "none of target_modules"),
    "a target without tensors": (lambda one, _: one["target_modules"].append("k_proj"), "nothing for 'k_proj'"),
    "NaN": (lambda _, one: one[f"{UP}A.weight"].mul_(torch.nan), "NaN or infinite"),
    "an embedding": (lambda _, one: change(one, "lora_A.weight", "lora_embedding_A"), "none of a linear layer's"),
    "a norm": (lambda _, one: change(one, "mlp.up_proj", "input_layernorm"), "none of target_modules"),
    "whole layers": (lambda one, _: one.update(modules_to_save=["lm_head"]), "modules_to_save"),
    "another method": (lambda one, _: one.update(peft_type="IA3"), "only 'LORA'"),
}


@pytest.mark.parametrize("what", BAD)
def test_what_does_not_fit_is_refused_before_anything_is_written(what: str, tmp_path: pathlib.Path) -> None:
    folder = written("dora", tmp_path / "model")
    place = folder / "adapter"
    config = json.loads((place / "adapter_config.json").read_text())
    tensors = load_file(place / "adapter_model.safetensors")
    apply, said = BAD[what]
    apply(config, tensors)
    (place / "adapter_config.json").write_text(json.dumps(config))
    save_file({name: one.contiguous() for name, one in tensors.items()}, place / "adapter_model.safetensors")
    with pytest.raises((LoadError, ConfigError), match=said):
        Merge(folder, read_arch(folder), str(place))


def test_what_cannot_be_merged_into(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = written("dora", tmp_path / "model")
    words = ["merge", str(folder), str(folder / "adapter"), str(tmp_path / "out")]
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    assert main(words) == 2 and "is not empty" in capsys.readouterr().err
    (tmp_path / "out" / "mine").unlink()
    config = json.loads((folder / "config.json").read_text())
    coded = config | {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 16}}
    (folder / "config.json").write_text(json.dumps(coded))
    assert main(words) == 2 and "is quantised (GPTQ, int4 in groups of 16)" in capsys.readouterr().err
    tied = written("dora-rs", tmp_path / "tied")
    (tied / "config.json").write_text(json.dumps(SAID["dora-rs"]["model"] | {"tie_word_embeddings": True}))
    with pytest.raises(LoadError, match="the head is the embedding"):
        Merge(tied, read_arch(tied), str(tied / "adapter"))
    assert [*(tmp_path / "out").iterdir()] == []


def test_a_checkpoint_that_is_damaged_leaves_nothing(tmp_path: pathlib.Path) -> None:
    folder = written("dora", tmp_path / "model")
    merge = Merge(folder, read_arch(folder), str(folder / "adapter"))
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-100])
    with pytest.raises(LoadError), Folder(tmp_path / "out", 1) as target:
        for tensors in merge:
            target.add(tensors)
    assert not (tmp_path / "out").exists()


def test_targets_that_are_left_out_have_no_tensors(tmp_path: pathlib.Path) -> None:
    """PEFT names them among the targets too."""
    folder = written("dora", tmp_path / "model")
    path = folder / "adapter" / "adapter_config.json"
    config = json.loads(path.read_text())
    config |= {"target_modules": [*config["target_modules"], "k_proj"], "exclude_modules": ["k_proj"]}
    path.write_text(json.dumps(config))
    assert len(list(Merge(folder, read_arch(folder), str(folder / "adapter")))) == 1


def test_a_head_that_peft_stored_counts(tmp_path: pathlib.Path) -> None:
    """In the place of the checkpoint's own: here it is twice as large, and DoRA does not see it but by its adapter."""
    folder = written("dora-rs", tmp_path / "model")
    path = folder / "adapter" / "adapter_model.safetensors"
    tensors, at = load_file(path), "base_model.model.lm_head"
    tensors[f"{at}.base_layer.weight"] *= 2
    save_file(tensors, path)
    (found,) = Merge(folder, read_arch(folder), str(folder / "adapter"))
    a, b, m = (tensors[f"{at}.lora_{kind}"] for kind in ("A.weight", "B.weight", "magnitude_vector"))
    whole = 2 * arrays("dora-rs", "base")["lm_head.weight"] + 6 / math.sqrt(4) * b @ a
    torch.testing.assert_close(found["lm_head.weight"], m[:, None] * whole / whole.norm(dim=1, keepdim=True))
