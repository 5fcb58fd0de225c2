"""`quire plan` of quantised checkpoints: as the engine keeps them on the device, or decoded."""

from __future__ import annotations

import json
import pathlib

import pytest

from quire.bench.shape import FOLDER
from quire.cli.command import run

FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert run(["plan", *words]) == 0
    return capsys.readouterr().out


def quantised(folder: pathlib.Path, shape: str, **added: object) -> str:
    """A folder with the description of a bundled shape, and more in it."""
    config = json.loads((FOLDER / shape / "config.json").read_text()) | added
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_a_quantised_checkpoint_is_planned_as_it_is_kept(
    capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    """Else Qwen3-30B-A3B-FP8 would not fit on a GPU of 48 GB, and gpt-oss-120b on none of 80."""
    model = quantised(tmp_path, "qwen3-30b-a3b", **FP8)
    found = json.loads(planned(capsys, model, "--gpu", "l40s", "--slo", "none", "--json"))
    assert 28.4 < found["facts"]["weights_bytes"] / 2**30 < 29.2, "one byte a weight, but of embedding, head and router"
    assert found["memory"]["fits"] and "--quantization" not in found["command"] and not found["cannot"]
    text = planned(capsys, model, "--gpu", "h100", "--slo", "none")
    assert "FP8 in blocks of 128 x 128; kept so where it is quantised, as fp8-block128" in text
    assert run(["plan", model, "--gpu", "a100-40"]) == 1
    assert "decoded on the A100-40" in capsys.readouterr().out, "which multiplies no e4m3"
    decoded = planned(capsys, model, "--gpu", "h100", "--slo", "none", "--weights", "bfloat16")
    assert "weights 56.87 GiB" in decoded and "--dtype bfloat16 --quantization none" in decoded
    mxfp4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    model = quantised(tmp_path, "gpt-oss-120b", quantization_config=mxfp4)
    assert "weights 60.77 GiB" in planned(capsys, model), "its card says 60.8"


def test_mxfp4_of_compressed_tensors_needs_no_experts(
    capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
    coded = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized", "ignore": ["lm_head"]}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    model = quantised(tmp_path, "qwen3-8b", quantization_config=coded | {"config_groups": groups})
    assert "kept so where it is quantised, as mxfp4" in planned(capsys, model, "--gpu", "h100", "--slo", "none")


def test_layers_that_are_left_out_at_the_ends_stand_for_no_others(
    capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    """They were taken for all, which were planned as decoded."""
    left = {"modules_to_not_convert": ["model.layers.0", "model.layers.35", "lm_head"]}
    model = quantised(tmp_path, "qwen3-8b", quantization_config=FP8["quantization_config"] | left)
    assert "kept so where it is quantised, as fp8-block128" in planned(capsys, model, "--gpu", "h100", "--slo", "none")


def test_a_pattern_of_a_quantised_checkpoint_that_is_not_read_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    model = quantised(tmp_path, "qwen3-8b", quantization_config=FP8["quantization_config"] | {"ignore": ["re:(?i)x"]})
    assert run(["plan", model]) == 2
    assert "quantization_config: " in capsys.readouterr().err
