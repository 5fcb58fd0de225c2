"""What the families are compared with: transformers, new enough."""

from __future__ import annotations

import pathlib

import pytest
import transformers
from family_cases import checkpoint_of


@pytest.mark.parametrize(
    ("case", "installed", "least"),
    [
        ("mamba2", "5.22.0", "5.23"),
        ("bamba", "5.17.0", "5.23"),
        ("granitemoehybrid-dense", "5.9.1.dev0", "5.23"),
        ("gpt_oss", "5.18.0", "5.19"),
    ],
)
def test_an_old_transformers_is_named(
    case: str, installed: str, least: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A comparison with what it computes would blame us."""
    monkeypatch.setattr(transformers, "__version__", installed)
    with pytest.raises(pytest.fail.Exception, match=rf"transformers {installed} .* compare with {least} or newer"):
        checkpoint_of(case, tmp_path)


@pytest.mark.parametrize(("case", "installed"), [("mamba2-bias", "5.17.0"), ("gpt_oss", "5.19.0"), ("mamba2", "6.0.0")])
def test_what_a_version_computes_rightly_is_compared(
    case: str, installed: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers, "__version__", installed)
    checkpoint_of(case, tmp_path)
