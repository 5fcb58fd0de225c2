"""`quire doctor`: each check with the machine that makes it complain."""

from __future__ import annotations

import argparse
import json
import pathlib
import shutil
import socket
import subprocess
import sys
import tomllib
import types

import numpy as np
import pytest

from quire.bench import machine
from quire.cli import doctor
from quire.cli.doctor import Finding, Status
from quire.cli.main import main
from quire.core import host

ROOT = pathlib.Path(__file__).resolve().parents[3]


def only(findings: list[Finding], name: str) -> Finding:
    (found,) = [finding for finding in findings if finding.name == name]
    return found


def test_failures_decide_the_exit_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = Finding("a", Status.WARN, "x", "do y"), Finding("b", Status.FAIL, "z")
    for findings, code in (([good], 0), ([good, bad], 1)):
        monkeypatch.setattr(doctor, "examine", lambda findings=findings: findings)
        assert doctor.run(argparse.Namespace(json=False)) == code
        assert "→ do y" in capsys.readouterr().out
        assert doctor.run(argparse.Namespace(json=True)) == code
        report = json.loads(capsys.readouterr().out)
        assert report["can_serve"] is (code == 0) and report["findings"][0]["status"] == "warn"


def test_old_python_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    assert only(list(doctor.check_python()), "python").status is Status.OK
    monkeypatch.setattr(doctor, "MIN_PYTHON", (9, 0))
    assert only(list(doctor.check_python()), "python").status is Status.FAIL


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert next(doctor.check_packages()).status is Status.OK
    monkeypatch.setitem(doctor.NEEDED, "no_such_module", "no-such-package")
    finding = next(doctor.check_packages())
    assert finding.status is Status.FAIL and finding.advice == "pip install no-such-package"


def test_needed_packages_are_dependencies() -> None:
    declared = " ".join(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"])
    assert all(package in declared for package in doctor.NEEDED.values())


def fake_modules(monkeypatch: pytest.MonkeyPatch, **modules: object) -> None:
    """`importlib.import_module` as the doctor sees it; an exception as a module is raised."""

    def import_module(name: str) -> object:
        module = modules[name.rpartition(".")[2]]
        if isinstance(module, Exception):
            raise module
        return module

    monkeypatch.setattr(doctor.importlib, "import_module", import_module)


def torch_of(version: str, cuda: str | None) -> types.SimpleNamespace:
    return types.SimpleNamespace(
        __version__=version, version=types.SimpleNamespace(cuda=cuda), get_num_threads=lambda: 2
    )


@pytest.mark.parametrize("torch, status", [
    (torch_of("2.13.0+cpu", None), Status.OK), (torch_of("2.11.1", "13.0"), Status.OK),
    (torch_of("2.9.0", None), Status.WARN), (torch_of("2.14.0", None), Status.WARN),
    (ImportError("no torch"), Status.FAIL), (OSError("libcudart missing"), Status.FAIL),
])  # fmt: skip
def test_torch(monkeypatch: pytest.MonkeyPatch, torch: object, status: Status) -> None:
    fake_modules(monkeypatch, torch=torch)
    assert next(doctor.check_torch()).status is status


def test_gpu_that_torch_cannot_use_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"name": "H200", "memory.total": "143771 MiB", "driver_version": "580"}
    fake_modules(monkeypatch, cuda=types.SimpleNamespace(is_available=lambda: False))
    monkeypatch.setattr(machine, "gpus", lambda: [row])
    findings = list(doctor.check_gpus())
    assert only(findings, "cuda").status is Status.WARN and "H200" in only(findings, "gpu").value
    monkeypatch.setattr(machine, "gpus", list)
    assert only(list(doctor.check_gpus()), "gpu").status is Status.NOTE
    fake_modules(monkeypatch, cuda=types.SimpleNamespace(is_available=lambda: True, describe=lambda: ["H200, 141 GiB"]))
    assert only(list(doctor.check_gpus()), "cuda").value == "H200, 141 GiB"


def test_port_in_use_is_seen() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert next(doctor.check_port(port)).value == "in use"
    assert next(doctor.check_port(port)).status is Status.OK


def test_cache_folder_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "new"))
    assert next(doctor.check_cache()).status is Status.OK
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "file" / "below"))
    finding = next(doctor.check_cache())
    assert finding.status is Status.WARN and "QUIRE_CACHE_DIR" in finding.advice


def test_environment_hides_keys_and_names_misspelt_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_API_KEY", "sesame")
    monkeypatch.setenv("QUIRE_LOGLEVEL", "DEBUG")
    findings = list(doctor.check_environment())
    assert "sesame" not in repr(findings)
    assert any(finding.value == "QUIRE_LOGLEVEL is set" for finding in findings)
    monkeypatch.setenv("QUIRE_API_KEY", " ")
    assert Status.FAIL in {finding.status for finding in doctor.check_environment()}


def test_native_kernels_and_demo_model_problems_are_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    native = types.SimpleNamespace(library=lambda: None, explain=lambda: "not built")
    fake_modules(monkeypatch, native=native, hub=OSError("x"))
    assert next(doctor.check_native()) == Finding("cpu kernels", Status.WARN, "not built")
    assert next(doctor.check_demo()).status is Status.WARN


def test_memory_of_a_small_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "memory_bytes", lambda: (4 * 2**30, 2**30))
    assert next(doctor.check_memory()).status is Status.WARN


def test_a_limit_on_address_space_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for left, status in ((host.UNLIMITED, None), (64 * 2**30, Status.NOTE), (2**30, Status.WARN)):
        monkeypatch.setattr(host, "address_bytes", lambda left=left: left)
        found = {finding.name: finding for finding in doctor.check_memory()}
        assert (found["address space"].status if "address space" in found else None) is status


def test_the_whole_examination_runs_here() -> None:
    command = [sys.executable, "-m", "quire", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    report = json.loads(done.stdout)
    names = {finding["name"] for finding in report["findings"]}
    assert report["can_serve"] is (done.returncode == 0)
    assert {"python", "processor", "memory", "torch", "cpu kernels", "demo model", "cache folder", "port 8000"} <= names


def sizes(folder: pathlib.Path, **more: object) -> pathlib.Path:
    config = {
        "architectures": ["Exaone4ForCausalLM"], "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
        "sliding_window": 9, "sliding_window_pattern": 3, **more,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_model_is_told_by_its_parts(tmp_path: pathlib.Path) -> None:
    findings = list(doctor.check_model(str(sizes(tmp_path))))
    said = [(finding.name, finding.value) for finding in findings]
    heads = "4 heads of 16, 2 of keys and values"
    normed = "scale 0.25, q and k normed (RMS, epsilon 1e-05, each head with the same weights)"
    assert said[1:-2] == [
        ("family", "exaone4: 6 layers, hidden size 64, vocabulary 256, context 128"),
        ("attention", f"{heads}, window of 9 tokens, {normed} (layers 0-1, 3-4)"),
        ("attention", f"{heads}, no window, {normed} (layers 2, 5)"),
        ("positions", "rope of theta 10,000, type default (layers 0-1, 3-4)"),
        ("positions", "none (layers 2, 5)"),
        ("norms", "RMS, epsilon 1e-05, after attention and after the feed-forward"),
        ("feed-forward", "gated silu, 96 wide"),
        ("final norm", "RMS, epsilon 1e-05"),
        ("head", "of its own"),
        ("multipliers", "none"),
        ("parameters", "218,112, 852.00 KiB as float32"),
        ("keys and values", "1.50 KiB a token as float32, over all layers"),
    ]
    assert findings[-1].name == "tensors" and findings[-1].status is Status.FAIL, "the folder has no weights"
    assert findings[-2].status is Status.WARN and "tokenizer.json is missing" in findings[-2].value


def test_keys_that_nothing_reads_are_listed(tmp_path: pathlib.Path) -> None:
    known = {"initializer_range": 0.02, "_name_or_path": "x", "use_cache": True, "attention_dropout": 0.1}
    findings = list(doctor.check_model(str(sizes(tmp_path, **known, new_kind_of_norm=True))))
    finding = only(findings, "keys not read")
    assert (finding.value, finding.status) == ("'new_kind_of_norm'", Status.NOTE)
    assert not [one for one in doctor.check_model(str(sizes(tmp_path, **known))) if one.name == "keys not read"]


def test_a_bundled_shape_is_told_by_its_parts(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.run(argparse.Namespace(json=False, model_argument="shape:deepseek-v2-lite")) == 0
    out = capsys.readouterr().out
    assert "latent, 16 heads of 128 + 64" in out and "the weights of a shape are random" in out
    assert doctor.run(argparse.Namespace(json=False, model_argument="shape:deepseek-v3-lite")) == 1
    assert "is not a bundled shape" in capsys.readouterr().out


def test_the_key_that_stands_against_a_model_is_named(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(**more: object) -> str:
        namespace = argparse.Namespace(json=False, model_argument=str(sizes(tmp_path, **more)))
        assert doctor.run(namespace) == 1
        out = capsys.readouterr().out
        assert "This model does not run." in out
        return out

    assert "sliding_window_pattern = 'LLLG' must be an integer" in said(sliding_window_pattern="LLLG")
    assert "'Exaone5ForCausalLM' is not supported. Nearest to it" in said(architectures=["Exaone5ForCausalLM"])
    (tmp_path / "config.json").unlink()
    assert doctor.run(argparse.Namespace(json=True, model_argument=str(tmp_path))) == 1
    report = json.loads(capsys.readouterr().out)
    assert not report["can_serve"] and "has no config.json" in report["findings"][-1]["value"]
    assert doctor.run(argparse.Namespace(json=False, model_argument="org/name")) == 1
    assert "doctor fetches nothing" in capsys.readouterr().out


def test_the_bundled_model_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.run(argparse.Namespace(json=False, model_argument="demo")) == 0
    out = capsys.readouterr().out
    assert "all 74 in 1 file fit" in out and "4,096 tokens" in out and "This model runs." in out


def test_a_model_without_a_tokenizer_runs_with_a_warning(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("config.json", "model.safetensors"):
        shutil.copy(ROOT / "quire/_models/demo" / name, tmp_path)
    assert doctor.run(argparse.Namespace(json=False, model_argument=str(tmp_path))) == 0
    out = capsys.readouterr().out
    assert "--skip-tokenizer-init" in out and "This model runs as far as the warnings above say." in out


def test_a_missing_tensor_is_named(tmp_path: pathlib.Path) -> None:
    numpy = pytest.importorskip("safetensors.numpy")
    sizes(tmp_path)
    numpy.save_file({"model.norm.weight": np.ones(64, np.float32)}, tmp_path / "model.safetensors")
    finding = list(doctor.check_model(str(tmp_path)))[-1]
    assert finding.status is Status.FAIL and "the checkpoint has no tensor 'lm_head.weight'" in finding.value


def test_numerics_is_a_word_of_its_own(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What it measures: tests/cpu/bench/test_numerics.py. Here: which words are its own, and which a model's."""
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "numerics", "--dtype", "bf17"])
    error = capsys.readouterr().err
    assert ended.value.code == 2 and "quire doctor numerics: error" in error and "one of bf16, fp16, fp32" in error
    with pytest.raises(SystemExit):
        main(["doctor", "--dtype", "bf16"])
    assert "quire doctor: error: unknown option --dtype" in capsys.readouterr().err
    assert main(["doctor", "--json", "numerics"]) == 2
    assert "numerics comes first: quire doctor numerics [MODEL]" in capsys.readouterr().err
    monkeypatch.chdir(tmp_path)
    (tmp_path / "numerics").mkdir()
    sizes(tmp_path / "numerics")
    assert main(["doctor", "./numerics"]) == 1
    assert "feed-forward" in capsys.readouterr().out
