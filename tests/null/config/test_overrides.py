"""hf_overrides, generation_config, override_generation_config and download_dir reach what they are about."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import huggingface_hub
import pytest

from quire.compute.weights.hub import find_checkpoint
from quire.config.arch import ModelArch, merged, read_arch
from quire.config.engine import EngineConfig
from quire.config.generation import generation_defaults
from quire.core.errors import ConfigError


@pytest.fixture(scope="module")
def demo() -> pathlib.Path:
    return find_checkpoint("")


@pytest.fixture(scope="module")
def arch(demo: pathlib.Path) -> ModelArch:
    return read_arch(demo)


def test_overrides_are_merged() -> None:
    values = {"a": 1, "b": {"c": 1, "d": 2}, "e": 3}
    assert merged(values, {"a": 2, "b": {"d": 4}, "e": None, "f": 5}) == {"a": 2, "b": {"c": 1, "d": 4}, "f": 5}
    assert values["b"] == {"c": 1, "d": 2}


def test_hf_overrides_change_the_architecture(demo: pathlib.Path, arch: ModelArch) -> None:
    changed = read_arch(demo, {"rope_theta": 500000.0, "max_position_embeddings": 4096})
    assert (changed.rope.theta, changed.max_position) == (500000.0, 4096)
    assert (arch.rope.theta, arch.max_position) == (10000.0, 2048)
    with pytest.raises(ConfigError, match=r"config\.json with hf_overrides: hidden_act = 'gelu'"):
        read_arch(demo, {"hidden_act": "gelu"})


def defaults(demo: pathlib.Path, arch: ModelArch, **options: Any) -> tuple[dict[str, float], tuple[int, ...]]:
    found = generation_defaults(EngineConfig(**options), demo, arch)
    return found.sampling, found.eos_token_ids


def test_the_source_of_default_sampling(demo: pathlib.Path, arch: ModelArch, tmp_path: pathlib.Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.25, "eos_token_id": [2, 7]}))
    assert defaults(demo, arch, generation_config="vllm") == ({}, (2,))
    assert defaults(demo, arch, generation_config=str(tmp_path)) == ({"temperature": 0.25}, (2, 7))
    assert defaults(tmp_path, arch) == ({"temperature": 0.25}, (2, 7))
    with pytest.raises(ConfigError, match=r"must be auto, vllm, or a folder with a generation_config.json"):
        defaults(demo, arch, generation_config=str(tmp_path / "nowhere"))


def test_overrides_of_default_sampling_win(arch: ModelArch, tmp_path: pathlib.Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.25, "top_k": 4}))
    given = {"temperature": 0.5, "top_p": 0.9, "top_k": None, "eos_token_id": 9}
    assert defaults(tmp_path, arch, override_generation_config=given) == ({"temperature": 0.5, "top_p": 0.9}, (9,))
    greedy = defaults(tmp_path, arch, override_generation_config={"do_sample": False})
    assert greedy == ({"temperature": 0.0, "top_k": 4}, (2,))


@pytest.mark.parametrize("given, message", [
    ({"temprature": 1}, "has 'temprature': it can have temperature, top_p"),
    ({"temperature": -1}, r"temperature = -1 is not allowed"),
    ({"eos_token_id": "x"}, "override_generation_config: eos_token_id"),
    ({"do_sample": 1}, "do_sample = 1 must be true or false"),
])  # fmt: skip
def test_a_wrong_override_is_refused(demo: pathlib.Path, arch: ModelArch, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        defaults(demo, arch, override_generation_config=given)


def test_models_of_the_hub_are_kept_in_download_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    asked: dict[str, Any] = {}

    def fake(name: str, **options: Any) -> str:
        asked.update(options, name=name)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)
    assert find_checkpoint("org/name", "main", str(tmp_path / "kept")) == tmp_path
    assert (asked["name"], asked["revision"], asked["cache_dir"]) == ("org/name", "main", tmp_path / "kept")
    find_checkpoint("org/name")
    assert asked["cache_dir"] is None
