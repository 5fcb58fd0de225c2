"""Tensors that do not make a quantised matrix of the model are refused by name; what stands beside is left."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from coded_checkpoints import Format, fp8, gptq, mxfp4, nvfp4, packed, quantise
from family_cases import random_checkpoint
from safetensors.torch import load_file, save_file

from quire.compute.schemes import holding, integers
from quire.compute.schemes.coded import Coded
from quire.compute.weights.loader import load_model
from quire.config.model import read_arch
from quire.core.errors import LoadError
from quire.kernels.mxfp4.weight import VALUES

Tensors = dict[str, torch.Tensor]
UP = "model.layers.0.mlp.up_proj"


def load(folder: pathlib.Path, quantization: str = "auto") -> None:
    load_model(
        folder, read_arch(folder), dtype=torch.bfloat16, device=torch.device("cpu"), max_model_len=64,
        quantization=quantization, progress=False,
    )  # fmt: skip


def changed(folder: pathlib.Path, form: Format, change: Callable[[Tensors], None]) -> pathlib.Path:
    """A checkpoint whose tensors were changed."""
    random_checkpoint(folder / "floating", "Llama", num_hidden_layers=1, intermediate_size=128)
    quantise(folder / "floating", folder / "coded", form, folder / "plain")
    path = folder / "coded" / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    return folder / "coded"


def without(name: str) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.__delitem__(name)


def with_tensor(name: str, make: Callable[[torch.Tensor], torch.Tensor], source: str = "") -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: make(tensors[source or name]).contiguous()})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (without(f"{UP}.weight_scale"), f"of '{UP}', but not weight_scale, which int4 in groups of 32 needs"),
        (with_tensor(f"{UP}.weight_scale", torch.t), f"{UP}.weight_scale has shape (2, 128); a matrix [128, 64] in"),
        (with_tensor(f"{UP}.weight_scale", torch.Tensor.int), "weight_scale has dtype I32; int4 in groups of 32"),
        (with_tensor(f"{UP}.weight_packed", lambda one: one[:, :4]), "has shape (128, 4)"),
        (with_tensor(f"{UP}.weight_scale", lambda one: one * torch.inf), f"'{UP}' has NaN or infinite"),
        (
            with_tensor("model.layers.1.mlp.up_proj.weight_packed", torch.clone, f"{UP}.weight_packed"),
            "has weight_packed of I32 of 'model.layers.1.mlp.up_proj', but not",
        ),
        (with_tensor("model.layers.0.mlp.more.weight", torch.clone, f"{UP}.weight_scale"), "model does not use"),
    ],
    ids=["lacking", "shape", "dtype", "short", "infinite", "another", "more"],
)  # fmt: skip
def test_what_makes_no_matrix_is_named(change: Callable[[Tensors], None], said: str, tmp_path: pathlib.Path) -> None:
    with pytest.raises(LoadError) as caught:
        load(changed(tmp_path, packed(4, 32), change))
    assert said in caught.value.message


def test_a_module_is_no_target(tmp_path: pathlib.Path) -> None:
    folder = changed(tmp_path, packed(4, 32), lambda tensors: None)
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["targets"] = ["re:.*self_attn.*"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(LoadError, match=r"mlp\.\w+_proj' is quantised, but no group of quantization_config has it"):
        load(folder)


def test_what_stands_beside_is_left(tmp_path: pathlib.Path) -> None:
    """Biases of zeros that old writers of GPTQ add, and scales of a quantised cache."""

    def add(tensors: Tensors) -> None:
        tensors |= {f"{UP}.bias": torch.zeros(128).half(), "model.layers.0.self_attn.k_scale": torch.ones(1)}

    load(changed(tmp_path, gptq(4, 32), add))


@pytest.mark.parametrize("number", [1e-3, float("nan")])
def test_an_added_bias_that_is_not_zero_is_refused(tmp_path: pathlib.Path, number: float) -> None:
    bias = torch.zeros(128).half()
    bias[-1] = number
    folder = changed(tmp_path, gptq(4, 32), lambda tensors: tensors.update({f"{UP}.bias": bias}))
    with pytest.raises(LoadError, match=rf"tensor {UP}\.bias in .* is not zero, and the model has no bias there"):
        load(folder)


@pytest.mark.parametrize("scale", [0.0, -0.5, float("nan"), float("inf")])
def test_scales_of_activations_must_be_of_use(
    tmp_path: pathlib.Path, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where they are used: as GPUs keep such matrices."""
    name = f"{UP}.input_scale"
    folder = changed(tmp_path, fp8(None, static=True), lambda tensors: tensors.update({name: torch.tensor(scale)}))
    load(folder)
    monkeypatch.setitem(holding.HOLDERS, "cpu", holding.HOLDERS["cuda"])
    with pytest.raises(LoadError, match=rf"tensor {name} is .*: what its matrix multiplies is rounded with it"):
        load(folder)
    load(folder, "none")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (without(f"{UP}.weight_global_scale"), "either weight_packed and weight_global_scale, or weight and weight_sc"),
        (with_tensor(f"{UP}.weight_scale_2", torch.clone, f"{UP}.weight_global_scale"), "either weight_packed and"),
        (with_tensor(f"{UP}.weight_global_scale", torch.zeros_like), f"'{UP}': its scales are NaN or infinite"),
        (with_tensor(f"{UP}.weight_packed", lambda one: one[:, :4]), "has shape (128, 4)"),
    ],
    ids=["lacking", "both", "zero", "short"],
)
def test_nvfp4_that_contradicts_itself(change: Callable[[Tensors], None], said: str, tmp_path: pathlib.Path) -> None:
    with pytest.raises(LoadError) as caught:
        load(changed(tmp_path, nvfp4(), change))
    assert said in caught.value.message


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (without(f"{UP}.weight_scale"), f"'{UP}': it has weight_packed; it must have either _blocks and _scales, or"),
        (without(f"{UP}.weight_packed"), f"'{UP}': it has weight_scale; it must have either"),
        (with_tensor(f"{UP}_scales", torch.clone, f"{UP}.weight_scale"), "has _scales and weight_packed and weight_sc"),
        (with_tensor(f"{UP}.weight_scale", lambda one: one[:, :1]), f"{UP}.weight_scale has shape (128, 1); a matrix"),
        (
            with_tensor(f"{UP}.weight_packed", lambda one: one[:, :31]),
            "has shape (128, 31); a matrix [128, 64] in MXFP4",
        ),
        (with_tensor(f"{UP}.weight_scale", torch.Tensor.half), "weight_scale has dtype F16; MXFP4 in groups of 32 im"),
        (
            with_tensor(f"{UP}.weight_scale", lambda one: one | 255),
            f"{UP}' has NaN or infinite scales",
        ),
    ],
    ids=["lacking", "codes", "both", "scales", "odd", "dtype", "nan"],
)
def test_mxfp4_that_contradicts_itself(change: Callable[[Tensors], None], said: str, tmp_path: pathlib.Path) -> None:
    with pytest.raises(LoadError) as caught:
        load(changed(tmp_path, mxfp4(), change))
    assert said in caught.value.message


def test_powers_of_two_are_held_by_the_kernels_of_a_cpu() -> None:
    """The least and the greatest; a block of zeros may have any."""
    codes = torch.arange(96, dtype=torch.uint8)[None] % 16
    codes[:, 64:] = 8

    def held(*exponents: int) -> tuple[torch.Tensor, torch.Tensor]:
        scales = torch.tensor([[127 + one for one in exponents]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
        coded, product = Coded(codes, scales, 32, table=VALUES), integers.MXFP4.begin(1, 96, torch.device("cpu"))
        integers.MXFP4.put(product, 0, coded)
        decoded = torch.empty(1, 96)
        coded.decode(decoded)
        return product.packed.dequantized(), decoded

    assert torch.equal(*held(-31, 8, -127))
    with pytest.raises(ValueError, match="a scale is NaN, infinite or beyond 511"):
        held(-31, 9, 0)
    found, decoded = held(-40, 0, 0)
    assert torch.equal(found[:, 32:], decoded[:, 32:]) and float((found - decoded).abs().max()) < 1e-8


def test_scales_that_kernels_cannot_hold_are_refused_with_what_decodes_them(tmp_path: pathlib.Path) -> None:
    folder = changed(tmp_path, packed(4, 32), with_tensor(f"{UP}.weight_scale", lambda one: one * 2.0**14))
    with pytest.raises(LoadError, match=r"a scale is NaN, infinite or beyond 7\.99609; --quantization none decodes it"):
        load(folder)
    load(folder, "none")
