"""`quire bench`: what cannot be run is refused before the model is loaded."""

from __future__ import annotations

import pytest

from quire.bench.workloads import LatencyCase, check_lengths
from quire.cli import bench
from quire.cli.command import run
from quire.core.errors import ConfigError


@pytest.mark.parametrize(("options", "limit"), [([], 2048), (["--max-model-len", "1024"], 1024)])
def test_lengths_beyond_the_context_are_refused_before_loading(
    options: list[str], limit: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "load_llm", lambda _: pytest.fail("it loads"))
    assert run(["bench", "latency", "--input-len", "5000", "--output-len", "16", *options]) == 2
    assert capsys.readouterr().err == (
        f"quire: error: --input-len 5000 + --output-len 16 is more than the {limit} tokens that this model's context "
        "holds (max_model_len): lower one of them\n"
    )


def test_a_full_context_is_allowed() -> None:
    check_lengths([LatencyCase(1, 2032, 16)], 2048)
    with pytest.raises(ConfigError):
        check_lengths([LatencyCase(1, 2032, 16)], 2047)
