"""Random weights of a quantised model: what is coded, what holds it, and of which size its numbers are."""

from __future__ import annotations

import json
import logging
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from coded_checkpoints import FORMATS, mxfp4_experts, quantise
from coded_experts import wide
from family_cases import CASES, random_checkpoint
from test_rank_weights import RankOf

from quire.compute.layers.experts import Experts
from quire.compute.models.decoder import Decoder
from quire.compute.schemes import holding
from quire.compute.schemes.choice import choose
from quire.compute.schemes.scheme import FilledScheme
from quire.compute.weights import dummy
from quire.compute.weights.footprint import Weights
from quire.compute.weights.loader import load_model
from quire.compute.weights.pieces import take
from quire.config.arch import ModelArch
from quire.config.engine import EngineConfig
from quire.config.mesh import placed
from quire.config.model import parse_arch, read_arch
from quire.config.shapes import FOLDER
from quire.core.errors import ConfigError
from quire.core.sampling import SamplingParams
from quire.engine.llm import LLM
from quire.kernels import native
from quire.kernels.moe import CodedMatrices

CPU = torch.device("cpu")
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "head_dim": 64, "vocab_size": 256}
EXPERTS = {"gpt_oss": {"num_local_experts": 4}, "qwen3_moe": {"moe_intermediate_size": 64}}
MXFP4 = {"quantization_config": {"quant_method": "mxfp4"}}


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture
def as_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(holding.HOLDERS, "cpu", holding.HOLDERS["cuda"])


def load(folder: pathlib.Path, arch: ModelArch | None = None, **options: Any) -> Decoder:
    settings: dict[str, Any] = {"dtype": torch.float32, "quantization": "auto", "load_format": "dummy", **options}
    return load_model(folder, arch or read_arch(folder), device=CPU, max_model_len=64, progress=False, **settings)


def coded_folder(folder: pathlib.Path, name: str, **more: int) -> pathlib.Path:
    random_checkpoint(folder / "floating", "Llama", **{**SIZES, **more})
    quantise(folder / "floating", folder / "coded", FORMATS[name], folder / "plain")
    return folder / "coded"


def schemes(model: Decoder) -> dict[str, str]:
    return {linear.matrix.name: linear.scheme.name for linear in model.linears()}


def numbers(model: Decoder) -> dict[str, torch.Tensor]:
    """Name of a part of a coded matrix → its numbers: products with rows of one 1."""
    found: dict[str, torch.Tensor] = {}
    for linear in model.linears():
        if isinstance(linear.scheme, FilledScheme):
            weight = linear.product(torch.eye(linear.matrix.n_in), None).t()
            rows = torch.split(weight, [n for _, n in linear.matrix.parts])
            found |= {f"{name}.weight": own for (name, _), own in zip(linear.matrix.parts, rows, strict=True)}
    return found


def check_numbers(weight: torch.Tensor) -> None:
    assert weight.isfinite().all() and len(weight.unique()) > 15
    assert abs(float(weight.mean())) < 0.002 and 0.014 < float(weight.std()) < 0.026


@pytest.mark.parametrize("name", FORMATS)
def test_schemes_are_those_of_a_checkpoint(
    name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As a CPU keeps them and as GPUs do; in memory they are as large, and as large as was counted before."""
    folder = coded_folder(tmp_path, name)
    for device in ("cpu", "cuda"):
        monkeypatch.setitem(holding.HOLDERS, "cpu", holding.HOLDERS[device])
        real = load(folder, load_format="auto")
        caplog.clear()
        with caplog.at_level(logging.INFO):
            model = load(folder)
        assert schemes(model) == schemes(real) and model.n_bytes == real.n_bytes
        kept = {one.name for one in (linear.scheme for linear in model.linears()) if isinstance(one, FilledScheme)}
        assert (f"kept as {kept.pop()}" if kept else "not kept as such here: numbers in float32") in caplog.text
        sizes = Weights(folder, model.arch, CPU, "dummy").footprint(torch.float32, "auto")
        assert sizes.held_bytes == model.n_bytes <= sizes.peak_bytes <= sizes.address_bytes
    found = numbers(model)
    for weight in found.values():
        check_numbers(weight)
    assert all(torch.equal(one, found[key]) for key, one in numbers(load(folder)).items())
    other = numbers(load(folder, seed=1))
    assert not any(torch.equal(one, found[key]) for key, one in other.items())
    assert len({float(one.sum()) for one in found.values()}) == len(found), "each matrix has numbers of its own"
    assert not numbers(load(folder, quantization="none"))


@pytest.mark.usefixtures("as_on_gpus")
@pytest.mark.parametrize("case", EXPERTS)
def test_experts(case: str, tmp_path: pathlib.Path) -> None:
    """In MXFP4, of which nothing but experts is, and in NVFP4."""
    family, fields = CASES[case]
    random_checkpoint(tmp_path / "floating", family, **{**fields, **EXPERTS[case]})
    if case == "gpt_oss":
        mxfp4_experts(tmp_path / "floating", tmp_path / "coded", tmp_path / "plain")
    else:
        quantise(tmp_path / "floating", tmp_path / "coded", FORMATS["nvfp4"], tmp_path / "plain")
    model, real = (load(tmp_path / "coded", load_format=one) for one in ("dummy", "auto"))
    assert schemes(model) == schemes(real) and model.n_bytes == real.n_bytes
    for layer in model.layers:
        assert isinstance(layer.ffn, Experts)
        for bank in (layer.ffn.up, layer.ffn.down):
            assert isinstance(bank.matrices, CodedMatrices)
            for expert in range(len(bank.linears)):
                check_numbers(bank.matrices[expert])
    config = EngineConfig(enable_expert_parallel=True, tensor_parallel_size=2)
    arch = placed(read_arch(tmp_path / "coded"), config)
    for rank in range(2):
        part = load(tmp_path / "coded", arch=arch, comm=RankOf(rank, 2))
        for own, layer in zip(part.layers, model.layers, strict=True):
            some, every = (wide(one.ffn.down.matrices) for one in (own, layer))  # type: ignore[attr-defined]
            assert torch.equal(some, every[rank * len(some) :][: len(some)])
        sizes = Weights(tmp_path / "coded", arch, CPU, "dummy", RankOf(rank, 2)).footprint(torch.float32, "auto")
        assert part.n_bytes == sizes.held_bytes < real.n_bytes


@pytest.mark.usefixtures("as_on_gpus")
@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "packed-g128", "packed-g32-zeros", "fp8-blocks", "int8"])
def test_ranks_have_parts_of_one_model(name: str, tmp_path: pathlib.Path) -> None:
    folder = coded_folder(tmp_path, name, head_dim=128)  # no cut goes through a block
    whole = numbers(load(folder))
    for rank in range(2):
        model = load(folder, comm=RankOf(rank, 2))
        own, regions = numbers(model), model.regions()
        assert own.keys() == whole.keys()
        assert all(torch.equal(own[one], take(whole[one].contiguous(), regions[one])) for one in own)
        sizes = Weights(folder, read_arch(folder), CPU, "dummy", RankOf(rank, 2)).footprint(torch.float32, "auto")
        assert model.n_bytes == sizes.held_bytes <= sizes.peak_bytes


def test_a_gpt_oss_in_mxfp4_on_a_gpu() -> None:
    """13 GiB of the 20B's 39, before a byte is loaded."""
    folder = FOLDER / "gpt-oss-20b"
    arch, cuda = read_arch(folder, MXFP4), torch.device("cuda")
    found = choose("auto", cuda, torch.bfloat16, arch, sources=dummy.implied(arch, torch.bfloat16))
    assert {scheme.name for scheme in found.own.values()} == {"mxfp4"} and len(found.own) == 24 * 32 * 2
    footprint = Weights(folder, arch, cuda, "dummy").footprint
    assert 12.5 < footprint(torch.bfloat16, "auto").held_bytes / 2**30 < 13
    assert footprint(torch.bfloat16, "none").held_bytes >= 2 * arch.n_parameters


@pytest.mark.skipif(native.library() is None, reason="the CPU's kernels are not built")
@pytest.mark.parametrize(("name", "kept"), [("gptq-g128", "int4-g128"), ("packed-8", "int8-g32"), ("int8", "int8")])
def test_in_an_engine(name: str, kept: str, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    """By --hf-overrides alone; the seed decides the tokens."""
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "num_attention_heads": 4,
                                                      "max_position_embeddings": 128, **SIZES}))  # fmt: skip
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)

    def run(seed: int) -> list[int]:
        llm = LLM(
            str(tmp_path), device="cpu", load_format="dummy", seed=seed, skip_tokenizer_init=True, max_num_seqs=2,
            num_gpu_blocks_override=33, hf_overrides={"quantization_config": dict(FORMATS[name].config)},
        )  # fmt: skip
        (one,) = llm.generate([[1, 2, 3]], greedy, use_tqdm=False)
        llm.shutdown()
        return list(one.outputs[0].token_ids)

    with caplog.at_level(logging.INFO):
        first = run(3)
    assert f"14 matrices in {'int4' if 'int4' in kept else 'int8'}" in caplog.text and f"kept as {kept}" in caplog.text
    assert run(3) == first != run(4)


LLAMA = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 128,
}  # fmt: skip
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
PACKED = dict(FORMATS["packed-g128"].config)
NVFP4 = {"quant_algo": "NVFP4", "exclude_modules": ["model.layers.*.mlp"]}
LAYERS, HEAD = 2 * 7, 1


@pytest.mark.parametrize(
    ("quantization", "n_coded"),
    [
        (GPTQ, LAYERS),
        ({**GPTQ, "lm_head": True}, LAYERS + HEAD),
        ({**GPTQ, "dynamic": {"-:.*down_proj": {}}}, LAYERS - 2),
        ({**GPTQ, "modules_in_block_to_quantize": [["self_attn.q_proj"], ["mlp.up_proj", "mlp.down_proj"]]}, 6),
        ({**GPTQ, "modules_in_block_to_quantize": ["mlp.down_proj"]}, 2),
        ({**GPTQ, "modules_in_block_to_quantize": None}, LAYERS),
        ({"quant_method": "fp8", "modules_to_not_convert": ["model.layers.1", "gate"]}, 7),
        ({"quant_method": "fp8", "ignored_layers": ["mlp.gate_up_proj"]}, LAYERS - 4),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["*self_attn*"]}, 6),
        ({"quant_method": "modelopt", "quantization": NVFP4}, 8),
        (PACKED, LAYERS),
        ({**PACKED, "ignore": []}, LAYERS + HEAD),
        ({**PACKED, "ignore": ["re:.*self_attn.*", "lm_head"]}, 6),
        (MXFP4["quantization_config"], 0),
        (dict(FORMATS["mxfp4"].config), LAYERS),
    ],
)  # fmt: skip
def test_what_a_writer_leaves(quantization: dict[str, Any], n_coded: int) -> None:
    arch = parse_arch({**LLAMA, "quantization_config": quantization})
    assert len(dummy.implied(arch, torch.bfloat16)) == n_coded
    tied = parse_arch({**LLAMA, "quantization_config": quantization, "tie_word_embeddings": True})
    assert len(dummy.implied(tied, torch.bfloat16)) == min(n_coded, LAYERS)


def test_nothing_coded_is_said(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **MXFP4}))
    with caplog.at_level(logging.INFO):
        load(tmp_path)
    assert "as of a checkpoint in MXFP4: no matrix of this model is coded" in caplog.text


def test_a_pattern_that_is_not_read() -> None:
    arch = parse_arch({**LLAMA, "quantization_config": {**PACKED, "ignore": ["re:(?<=a)b"]}})
    with pytest.raises(ConfigError, match=r"quantization_config: "):
        dummy.implied(arch, torch.bfloat16)
