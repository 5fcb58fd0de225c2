"""The model argument: bundled, local or hub; the hub is a stub."""

from __future__ import annotations

import pathlib
import subprocess
import sys
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from quire.compute.weights import hub
from quire.compute.weights.hub import find_checkpoint
from quire.core.errors import ConfigError, LoadError


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> list[dict[str, Any]]:
    """Arguments of each download; the stub answers with a folder."""
    recorded: list[dict[str, Any]] = []

    def download(name: str, **options: Any) -> str:
        recorded.append({"name": name, **options})
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return recorded


def test_bundled(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setattr(hub, "MODELS", tmp_path)
    with pytest.raises(LoadError, match="bundled model is missing"):
        find_checkpoint("")
    (tmp_path / "demo").mkdir()
    assert find_checkpoint("") == find_checkpoint("demo") == tmp_path / "demo"


def test_bundled_folder_is_inside_the_package() -> None:
    package = pathlib.Path(hub.__file__).parents[2]
    assert package.name == "quire" and package / "_models" == hub.MODELS


def test_local(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, calls: list[dict[str, Any]]) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert find_checkpoint(str(tmp_path / "org")) == tmp_path / "org"
    assert find_checkpoint("org/name") == pathlib.Path("org/name"), "a local folder wins over a hub name"
    assert not calls
    with pytest.raises(ConfigError, match="revision = 'main'") as caught:
        find_checkpoint("org/name", "main")
    assert caught.value.param == "revision"


@pytest.mark.parametrize(
    "model", ["/no/such/folder", "./nothing", "../a/b", "a/b/c", "a b/c", "org/", "name", "\0", "org/na\nme"]
)
def test_neither_folder_nor_name(model: str, calls: list[dict[str, Any]]) -> None:
    with pytest.raises(LoadError, match=r"neither an existing folder or \.gguf file, a bundled shape:NAME, nor a"):
        find_checkpoint(model)
    assert not calls


def test_the_shape_that_was_meant_is_named() -> None:
    with pytest.raises(LoadError, match=r"such as org/name; did you mean shape:llama-3\.1-8b\? The model that comes"):
        find_checkpoint("llama3.1-8b")


def test_who_means_the_bundled_model_is_told_its_name(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LoadError, match=r"'demo/' is neither .* is called demo, without a slash or a dot"):
        find_checkpoint("demo/")
    with pytest.raises(LoadError, match=r"'models/x/y' is neither .* comes with Quire is called demo\."):
        find_checkpoint("models/x/y")
    (tmp_path / "demo").mkdir()
    for written in ("demo/", "./demo"):
        with pytest.raises(LoadError, match=r"no config\.json.* is called demo, without a slash or a dot"):
            find_checkpoint(written)
    (tmp_path / "demo" / "config.json").touch()
    assert find_checkpoint("./demo") == pathlib.Path("demo")


def test_a_file(tmp_path: pathlib.Path) -> None:
    (tmp_path / "model.gguf").touch()
    assert find_checkpoint(str(tmp_path / "model.gguf")) == tmp_path / "model.gguf"
    with pytest.raises(ConfigError, match="revision = 'main' is for hub models"):
        find_checkpoint(str(tmp_path / "model.gguf"), "main")
    with pytest.raises(LoadError, match=r"GGUF files: name one of them, such as .*/model\.gguf"):
        find_checkpoint(str(tmp_path))
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(LoadError, match="is a file; name the folder"):
        find_checkpoint(str(tmp_path / "model.safetensors"))


def test_hub_name(tmp_path: pathlib.Path, calls: list[dict[str, Any]]) -> None:
    assert find_checkpoint("Qwen/Qwen3-0.6B") == tmp_path
    find_checkpoint("org/name", "v1.0")
    assert [(call["name"], call["revision"]) for call in calls] == [("Qwen/Qwen3-0.6B", None), ("org/name", "v1.0")]
    wanted, unwanted = calls[0]["allow_patterns"], calls[0]["ignore_patterns"]
    files = ["config.json", "model-00001-of-2.safetensors", "tokenizer.json", "pytorch_model.bin", "original/a.json"]
    files += ["consolidated.safetensors", "run.py", "tokenizer.model", "chat_template.jinja"]
    kept = huggingface_hub.utils.filter_repo_objects(files, allow_patterns=wanted, ignore_patterns=unwanted)
    assert sorted(kept) == sorted({*files[:3], "tokenizer.model", "chat_template.jinja"})


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (LocalEntryNotFoundError("offline"), "cannot be reached"),
        (OSError("disk full"), "cannot fetch org/name from the hub: OSError: 'disk full'"),
    ],
)
def test_failures(error: Exception, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str, **options: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(LoadError) as caught:
        find_checkpoint("org/name")
    assert message in caught.value.message


def test_pickled_files_are_refused_by_name(tmp_path: pathlib.Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(LoadError, match=r"is a file, and pickled weights are never read"):
        find_checkpoint(str(tmp_path / "pytorch_model.bin"))


def test_finding_a_folder_needs_no_torch() -> None:
    """The front end calls this in a process that never loads torch."""
    code = "import sys, quire.compute.weights.hub, quire.config.generation; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
