"""What the families are compared with: transformers, new enough, and in torch alone."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import family_cases
import pytest
from family_cases import checkpoint_of

TESTS = pathlib.Path(__file__).parents[3]
KERNELS = {
    "fla": ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"),
    "causal_conv1d": ("causal_conv1d_fn", "causal_conv1d_update"),
}
"""Package → its functions that transformers takes for Qwen3-Next where it is installed."""
ORACLE = """
import pathlib, sys, torch
from family_cases import IDS, checkpoint_of
oracle = checkpoint_of("qwen3_next-dense", pathlib.Path(sys.argv[1]))
assert oracle.generate(torch.tensor([IDS]), max_new_tokens=3).shape[1] > len(IDS)
assert not {"fla", "causal_conv1d"} & set(sys.modules)
import fla
"""


def test_kernels_that_are_installed_are_not_taken(tmp_path: pathlib.Path) -> None:
    """They need a GPU, and the oracle computes on the CPU."""
    for package, functions in KERNELS.items():
        lines = [f"def {name}(*_, **__): raise RuntimeError('a kernel was called')" for name in functions]
        (tmp_path / f"{package}.py").write_text("\n".join(lines))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), str(TESTS), str(TESTS.parent)))}
    command = [sys.executable, "-c", ORACLE, str(tmp_path / "model")]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


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
    monkeypatch.setattr(family_cases.transformers, "__version__", installed)
    with pytest.raises(pytest.fail.Exception, match=rf"transformers {installed} .* compare with {least} or newer"):
        checkpoint_of(case, tmp_path)


@pytest.mark.parametrize(("case", "installed"), [("mamba2-bias", "5.17.0"), ("gpt_oss", "5.19.0"), ("mamba2", "6.0.0")])
def test_what_a_version_computes_rightly_is_compared(
    case: str, installed: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(family_cases.transformers, "__version__", installed)
    checkpoint_of(case, tmp_path)
