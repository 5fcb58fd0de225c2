"""What reports say of the machine that they were made on."""

from __future__ import annotations

import pathlib
import sys

import pytest

from quire.bench.machine import package_versions


def test_peers_that_are_installed_are_named(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, version in (("fla_core", "0.6.0"), ("flashinfer_python", "0.2.1"), ("numpy", "2.0.0"), ("other", "1.0")):
        folder = tmp_path / f"{name}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert package_versions() == {"numpy": "2.0.0", "fla-core": "0.6.0", "flashinfer-python": "0.2.1"}
