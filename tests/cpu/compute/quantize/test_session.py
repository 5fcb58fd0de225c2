"""Folders that `Session` makes of random checkpoints, unpacked by the published layout and run by transformers."""

from __future__ import annotations

import errno
import json
import math
import pathlib
import shutil

import pytest
import torch
import torch.nn.functional as F
import transformers
from family_cases import CASES, checkpoint_of
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from quire.compute.device.cpu import CpuDevice
from quire.compute.quantize.alone import Alone
from quire.compute.quantize.folder import Folder
from quire.compute.quantize.folds import folds
from quire.compute.quantize.session import Recipe, Session, Streams, needed_bytes
from quire.compute.quantize.source import Source
from quire.compute.quantize.stored import n_bytes_of
from quire.config.model import read_arch
from quire.config.quantize import FORMATS, quantization_config
from quire.core.errors import ConfigError

DEVICE = CpuDevice()
LENGTH = 24
WRITTEN = {
    "qwen2_moe": ("int4-g32", "gptq"), "cohere-qk-norm": ("int4-g32", "awq"), "gemma2": ("int8", "awq"),
    "phi3": ("fp8", "gptq"), "gpt_neox": ("int4-g32", "awq"), "bamba": ("int4-g32", "gptq"),
    "starcoder2": ("int4-g32", "rtn"), "deepseek_v3": ("int4-g32", "awq"), "olmo2": ("2:4", "wanda"),
}  # fmt: skip
"""Family → scheme and method. Among them: experts, norms shared and with an offset, fused and grouped rows, biases."""


def streams() -> Streams:
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(1, 256, (9, LENGTH), generator=generator)
    return Streams(ids[:6], ids[6:])


def unpacked(folder: pathlib.Path, target: pathlib.Path) -> None:
    """A checkpoint of floating numbers, by https://github.com/vllm-project/compressed-tensors."""
    tensors: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        tensors |= load_file(path)
    found = {}
    for name, tensor in tensors.items():
        stem, _, kind = name.rpartition(".")
        scale = tensors.get(f"{stem}.weight_scale")
        if kind == "weight_packed" and scale is not None:
            n, k = tensors[f"{stem}.weight_shape"].tolist()
            codes = torch.stack([tensor >> 4 * i & 15 for i in range(8)], -1).reshape(n, -1)[:, :k] - 8
            found[f"{stem}.weight"] = codes * scale.repeat_interleave(k // scale.shape[1], 1)
        elif kind == "weight" and scale is not None:
            found[name] = tensor.to(scale.dtype) * scale
        elif kind not in ("weight_scale", "weight_shape"):
            found[name] = tensor
    config = json.loads((folder / "config.json").read_text())
    assert (
        config.pop("quantization_config", {"quant_method": "compressed-tensors"})["quant_method"]
        == "compressed-tensors"
    )
    target.mkdir()
    (target / "config.json").write_text(json.dumps(config))
    save_file(found, target / "model.safetensors", {"format": "pt"})


def bits(model: transformers.PreTrainedModel, ids: torch.Tensor) -> float:
    with torch.no_grad():
        logits = model(ids).logits.double()
    return float(F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")) / math.log(2)


@pytest.mark.parametrize("case", WRITTEN)
def test_transformers_computes_what_was_measured(case: str, tmp_path: pathlib.Path) -> None:
    (scheme, method), text = WRITTEN[case], streams()
    oracle = checkpoint_of(case, tmp_path / "model")
    source = Source(tmp_path / "model", read_arch(tmp_path / "model"), torch.float32, torch.device("cpu"))
    form = FORMATS[scheme]
    session = Session(source, DEVICE, Recipe(form, method), text)
    needed = n_bytes_of(source, form, session.scale_dtype.itemsize)
    with torch.inference_mode(), Folder(tmp_path / "out", source.arch.n_layers + 1, needed) as folder:
        reports = []
        for report in session.layers():
            folder.add(report.tensors)
            reports.append(report)
        folder.add(session.rest())
        before, after = session.quality()
        said = None if form.is_sparse else quantization_config(form, source.ignored(form.group), False)
        assert folder.finish(source.folder, said) == needed
    unpacked(tmp_path / "out", tmp_path / "plain")
    plain = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "plain", dtype=torch.float32, attn_implementation="eager"
    )
    assert before == pytest.approx(bits(oracle, text.held_out), rel=1e-5)
    assert after == pytest.approx(bits(plain, text.held_out), rel=1e-5)
    assert after != before and after == pytest.approx(before, rel=0.05)
    errors = [pair for report in reports for pair in report.errors.values()]
    assert len(errors) >= 2 * source.arch.n_layers
    ours, nearest = (sum(column) for column in zip(*errors, strict=True))
    assert ours == nearest if method == "rtn" else ours < nearest


@pytest.mark.parametrize("case", ["qwen2_moe", "cohere-qk-norm", "gemma2", "gpt_neox", "seed_oss-biases", "qwen3_next"])
def test_a_fold_leaves_what_a_layer_computes(case: str, tmp_path: pathlib.Path) -> None:
    checkpoint_of(case, tmp_path)
    arch = read_arch(tmp_path)
    source = Source(tmp_path, arch, torch.float32, torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    with torch.inference_mode():
        number = 1 if case == "qwen3_next" else 0  # gated attention
        layer = source.layer(number, source.ends(LENGTH))
        alone = Alone(arch, arch.layers[number], LENGTH, torch.float32, DEVICE)
        states = torch.randn(2, LENGTH, arch.hidden_size, generator=generator)
        expected, n_folds = alone.run(layer, states), 0
        for fold in folds(layer):
            factors = torch.rand(fold.readers[0].matrix.n_in, generator=generator) * 4 + 0.25
            fold.apply(fold.shared(factors))
            n_folds += 1
            assert torch.allclose(alone.run(layer, states), expected, rtol=1e-3, atol=1e-4), n_folds
    assert n_folds >= 2


@pytest.mark.parametrize(("case", "said"), [("gpt2", "inputs by outputs"), ("gpt_oss", "all experts in one")])
def test_what_cannot_be_written_is_refused(case: str, said: str, tmp_path: pathlib.Path) -> None:
    assert case in CASES
    checkpoint_of(case, tmp_path)
    with pytest.raises(ConfigError, match=said):
        Source(tmp_path, read_arch(tmp_path), torch.float32, torch.device("cpu"))


def test_too_little_memory_is_said_before_it_is_taken(tmp_path: pathlib.Path) -> None:
    class Small(CpuDevice):
        def free_bytes(self) -> int:
            return 100_000

    checkpoint_of("qwen3_moe", tmp_path)
    source = Source(tmp_path, read_arch(tmp_path), torch.float32, torch.device("cpu"))
    needed = needed_bytes(source, streams())
    assert 8 * 3 * 32 * 64 * 4 < needed < 2_000_000
    with pytest.raises(ConfigError, match=r"MiB at once, 97\.66 KiB are free: take fewer samples than 6"):
        Session(source, Small(), Recipe(FORMATS["int8"], "rtn"), streams())


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_end_before_the_end_leaves_nothing(error: type[BaseException], tmp_path: pathlib.Path) -> None:
    with pytest.raises(error), Folder(tmp_path / "out", 2) as folder:
        folder.add({"a": torch.zeros(3)})
        partial = next(tmp_path.iterdir())
        assert partial.name.startswith(".out.partial") and not (partial / "config.json").exists()
        raise error
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_said_before_and_while_it_is_written(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what safetensors raises then; nothing is left."""
    tensors, target = {"a": torch.zeros(1000)}, tmp_path / "out"

    def full(tensors: object, path: pathlib.Path, metadata: object) -> None:
        path.write_bytes(b"half of it")
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("quire.compute.quantize.folder.save_file", full)
    said = rf"{target}/model-00001-of-00002.safetensors cannot be written: it takes 3\.91 KiB, and .*No space left"
    with pytest.raises(ConfigError, match=said), Folder(target, 2) as folder:
        folder.add(tensors)
    assert [*tmp_path.iterdir()] == []
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10_000, 9000, 1000))  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"it takes 3\.91 KiB, and 1000 B are free"), Folder(target, 2) as folder:
        folder.add(tensors)
    with pytest.raises(ConfigError, match=rf"{target} cannot be written: it takes 1\.95 KiB"):
        Folder(target, 2, 2000)
    assert [*tmp_path.iterdir()] == []


def test_a_disk_that_is_full_at_the_end_leaves_nothing(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When all tensors are written: without its configuration it is no checkpoint."""
    checkpoint_of("phi3", tmp_path / "model")

    def full(path: pathlib.Path, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(ConfigError, match=r"config\.json cannot be written"), Folder(tmp_path / "out", 1) as folder:
        folder.add({"a": torch.zeros(3)})
        monkeypatch.setattr(pathlib.Path, "write_text", full)
        folder.finish(tmp_path / "model", None)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
