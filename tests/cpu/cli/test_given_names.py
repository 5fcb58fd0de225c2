"""A model is called what the user called it, and random weights are said to be random."""

from __future__ import annotations

import importlib
import json
import pathlib
from typing import Any

import pytest

from quire.cli.main import main
from quire.compute.weights.hub import find_checkpoint
from quire.config.engine import EngineConfig
from quire.config.model import read_arch
from quire.config.speculative import SpeculativeConfig
from quire.core.errors import ConfigError
from quire.engine.frontend import Frontend
from quire.engine.workers import _draft_source

NAMES = pytest.mark.parametrize("model", ["shape:qwen3-0.6b", "demo"])


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[EngineConfig]:
    """What `quire serve` would serve."""
    found: list[EngineConfig] = []

    def note(engine: EngineConfig, server: object) -> int:
        found.append(engine)
        return 0

    monkeypatch.setattr(importlib.import_module("quire.serve.server"), "run", note)
    monkeypatch.setattr("quire.cli.serve.ignore_hangups_until_served", lambda: None)
    monkeypatch.setattr("quire.cli.serve.stdio.show_stacks_on_signal", lambda: None)
    return found


@NAMES
def test_the_api_knows_it_by_that_name(served: list[EngineConfig], model: str) -> None:
    assert main(["serve", model]) == 0
    assert Frontend.load(served[0]).model_name == model
    assert main(["serve", model, "--served-model-name", "mine"]) == 0
    assert Frontend.load(served[1]).model_name == "mine"


def test_random_weights_are_said(served: list[EngineConfig], capsys: pytest.CaptureFixture[str]) -> None:
    def warnings(*words: str) -> list[str]:
        assert main(["serve", *words]) == 0
        return [line for line in capsys.readouterr().err.splitlines() if "warning" in line]

    (said,) = warnings("shape:qwen3-0.6b")
    assert said.startswith("quire: warning: the weights of shape:qwen3-0.6b are random") and "token ids" in said
    (said,) = warnings("demo", "--load-format", "dummy")
    assert "the weights of demo are random" in said and "token" not in said
    assert not warnings("demo")


@NAMES
def test_an_error_of_its_mtp_module_names_it(model: str) -> None:
    folder = find_checkpoint(model)
    speculative: Any = SpeculativeConfig(method="mtp", num_speculative_tokens=1)
    with pytest.raises(ConfigError, match=f"^{model} has no MTP module"):
        _draft_source(EngineConfig(model=model), speculative, folder, read_arch(folder), 1)


@pytest.mark.parametrize(
    ("method", "config", "said"),
    [
        ("draft_model", {"draft_vocab_size": 8}, 'is an EAGLE-3 head: use "method": "eagle3"'),
        ("draft_model", {"model_type": "none"}, ", which is to draft: "),
    ],
)
def test_an_error_of_a_draft_of_the_hub_names_it(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, method: Any, config: dict[str, Any], said: str
) -> None:
    cached = tmp_path / "models--org--draft" / "snapshots" / "0a1b"
    cached.mkdir(parents=True)
    (cached / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda _name, **_options: str(cached))
    speculative: Any = SpeculativeConfig(method=method, model="org/draft", num_speculative_tokens=1)
    folder = find_checkpoint("demo")
    with pytest.raises(ConfigError) as refused:
        _draft_source(EngineConfig(), speculative, folder, read_arch(folder), 1)
    assert refused.value.message.startswith(f"org/draft{said if said[0] == ',' else ' ' + said}")
