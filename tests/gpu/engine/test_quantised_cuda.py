"""Quantised checkpoints on a GPU: near to the same numbers decoded, and the same text eager and with graphs."""

from __future__ import annotations

import logging
import pathlib
from typing import Any

import pytest
import torch
import transformers
from coded_checkpoints import FORMATS, mxfp4_experts, quantise
from family_cases import CASES, IDS, random_checkpoint

from quire.core.sampling import SamplingParams
from quire.engine.llm import LLM

pytestmark = pytest.mark.gpu
SIZE = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "num_gpu_blocks_override": 65, "skip_tokenizer_init": True}
SMALL = {"hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2, "head_dim": 64}
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, prompt_logprobs=0)
KEPT = {
    "packed-g128": "int4", "packed-channel": "int4", "packed-order": "int4", "gptq-g64-zeros": "int4",
    "awq-g64": "int4", "int8": "int8", "fp8-blocks": "fp8", "fp8-static": "fp8", "gptq-v2-8": "",
    "nvfp4": "nvfp4", "nvfp4-modelopt": "nvfp4", "mxfp4": "mxfp4",
}  # fmt: skip
"""Coding → scheme that holds it; empty: it is decoded."""
NEAR = {"": 0.3, "int4": 0.3, "nvfp4": 0.3, "mxfp4": 0.3, "int8": 0.6, "fp8": 1.5}
"""Scheme → largest mean difference of log-probabilities, in bfloat16: random models amplify each rounding."""


def run(folder: pathlib.Path, **options: Any) -> tuple[torch.Tensor, list[int]]:
    """(log-probabilities of the prompt, tokens)."""
    llm = LLM(str(folder), device="cuda", dtype="bfloat16", **{**SIZE, **options})
    (one,) = llm.generate([IDS], GREEDY, use_tqdm=False)
    llm.shutdown()
    rows = zip(IDS[1:], (one.prompt_logprobs or [])[1:], strict=True)
    return torch.tensor([row[token].logprob for token, row in rows if row]), list(one.outputs[0].token_ids)


def expected_of(folder: pathlib.Path) -> torch.Tensor:
    """In float32."""
    oracle = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        logits = oracle(torch.tensor([IDS])).logits[0]
    return logits.log_softmax(-1)[:-1].gather(1, torch.tensor(IDS[1:])[:, None])[:, 0]


@pytest.mark.parametrize("name", KEPT)
def test_codings(name: str, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    random_checkpoint(tmp_path / "floating", "Llama", **SMALL)
    quantise(tmp_path / "floating", tmp_path / "coded", FORMATS[name], tmp_path / "plain")
    with caplog.at_level(logging.INFO):
        eager, text = run(tmp_path / "coded", enforce_eager=True)
    assert (f"kept as {KEPT[name]}" if KEPT[name] else "decoded into bfloat16, once") in caplog.text
    assert float((eager - expected_of(tmp_path / "plain")).abs().mean()) < NEAR[KEPT[name]]
    assert run(tmp_path / "coded")[1] == text


def test_experts_stay_in_mxfp4(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    family, fields = CASES["gpt_oss"]
    random_checkpoint(tmp_path / "floating", family, **fields)
    mxfp4_experts(tmp_path / "floating", tmp_path / "coded", tmp_path / "plain")
    with caplog.at_level(logging.INFO):
        eager, text = run(tmp_path / "coded", enforce_eager=True)
    assert "kept as mxfp4" in caplog.text
    assert float((eager - expected_of(tmp_path / "plain")).abs().mean()) < NEAR["int4"]
    assert run(tmp_path / "coded")[1] == text


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4"])
def test_experts_stay_in_four_bits(name: str, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    family, fields = CASES["qwen3_moe"]
    random_checkpoint(tmp_path / "floating", family, **{**fields, "moe_intermediate_size": 64})
    quantise(tmp_path / "floating", tmp_path / "coded", FORMATS[name], tmp_path / "plain")
    with caplog.at_level(logging.INFO):
        eager, text = run(tmp_path / "coded", enforce_eager=True)
    assert f"kept as {name}" in caplog.text and "decoded" not in caplog.text
    assert float((eager - expected_of(tmp_path / "plain")).abs().mean()) < NEAR[name]
    assert run(tmp_path / "coded")[1] == text


@pytest.mark.parametrize("name", ["fp8", "int8", "int4", "int4-g32", "int4-g128"])
@pytest.mark.parametrize(("family", "fields"), [("Llama", {}), CASES["qwen3_moe"]])
def test_rounded_while_loading(family: str, fields: dict[str, Any], name: str, tmp_path: pathlib.Path) -> None:
    """Experts too; routers stay floating."""
    random_checkpoint(tmp_path, family, **fields)
    eager, text = run(tmp_path, quantization=name, enforce_eager=True)
    assert float((eager - expected_of(tmp_path)).abs().mean()) < NEAR["fp8"]
    assert run(tmp_path, quantization=name)[1] == text


@pytest.mark.parametrize("name", [*KEPT, "gpt_oss"])
def test_random_codes(name: str, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    """Made on the device, kept as a checkpoint's are, and the same for one seed, eager and with graphs."""
    family, fields = CASES["gpt_oss"] if name == "gpt_oss" else ("Llama", SMALL)
    random_checkpoint(tmp_path, family, **fields)
    config = {"quant_method": "mxfp4"} if name == "gpt_oss" else dict(FORMATS[name].config)
    made = {"load_format": "dummy", "hf_overrides": {"quantization_config": config}}
    with caplog.at_level(logging.INFO):
        prompt, text = run(tmp_path, enforce_eager=True, **made)
    kept = KEPT.get(name, "mxfp4")
    assert (f"kept as {kept}" if kept else "not kept as such here: numbers in bfloat16") in caplog.text
    assert bool(prompt.isfinite().all()) and run(tmp_path, **made)[1] == text
