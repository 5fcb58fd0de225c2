"""`quire plan FILE.gguf` says what the file has, and what of it is planned larger than it is kept."""

from __future__ import annotations

import pathlib

import pytest
from gguf_files import write_gguf
from transformers import LlamaConfig, LlamaForCausalLM

from quire.cli.command import run


@pytest.mark.parametrize(("dtype", "gpu", "said"), [
    ("Q4_0", "h200", "matrices in Q4_0 stay so, and are planned in bfloat16: --weights int4-g32 plans all as kept"),
    ("MXFP4", "h200", "matrices in MXFP4 stay so, and are planned in bfloat16\n"),
    ("Q8_0", "h200", ""), ("Q6_K", "h200", ""), ("BF16", "h200", ""),
])  # fmt: skip
def test_blocks_that_stay_are_said(
    capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path, dtype: str, gpu: str, said: str
) -> None:
    config = LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=1, num_attention_heads=4, vocab_size=64
    )
    path = write_gguf(tmp_path / "m.gguf", LlamaForCausalLM(config), "llama", dtype)
    assert run(["plan", str(path), "--gpu", gpu, "--slo", "none"]) == 0
    text = capsys.readouterr().out
    assert "  checkpoint 1 file, " in text and f" {dtype}" in text
    assert said in text and ("stay so" in text) is bool(said)
    assert run(["plan", str(path), "--gpu", gpu, "--slo", "none", "--weights", "int4-g32"]) == 0
    assert "stay so" not in capsys.readouterr().out
