"""What ranks cannot share is said from the command line and config.json, before torch is imported."""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import sys

import pytest

from quire.cli.model import add_engine_flags, engine_config
from quire.config.flags import FlagParser
from quire.core.errors import ConfigError


def parsed(*words: str) -> argparse.Namespace:
    parser = FlagParser()
    add_engine_flags(parser)
    return parser.parse_args(list(words))


@pytest.mark.parametrize("words, message", [
    (("demo", "--tensor-parallel-size", "3"), r"a feed-forward is 1024 wide, which 3 ranks cannot .* \(2, 4 work\)"),
    (("demo", "--tensor-parallel-size", "2", "--enable-expert-parallel"), "llama has no experts"),
    (("demo", "--enable-expert-parallel"), "llama has no experts"),
    (("demo", "--ulysses-degree", "2"), "ulysses_degree = 2 and prefill_context_parallel_size = 1: .*-size 2 or more"),
    (("demo", "--context-parallel-method", "ring", "-tp", "2"), "context_parallel_method = 'ring' and .* leave"),
    (("shape:qwen3-0.6b", "--pipeline-parallel-size", "40"), "qwen3 has 28 layers, and each stage needs one"),
    (("shape:mamba2-2.7b", "--pipeline-parallel-size", "2"), "recurrent layers, whose states stages do not divide"),
    (("demo", "--data-parallel-size", "2", "--pipeline-parallel-size", "2"), "data-parallel ranks have no stages yet"),
])  # fmt: skip
def test_what_cannot_be_divided(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        engine_config(parsed(*words))


def test_what_is_not_here_is_left_to_the_engine(tmp_path: pathlib.Path) -> None:
    """A hub's model, a folder that is none of a model's, and an engine that computes nothing."""
    three = ("--tensor-parallel-size", "3")
    assert engine_config(parsed("org/name", *three)).tensor_parallel_size == 3
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Unknown"]}))
    assert engine_config(parsed(str(tmp_path), *three)).model == str(tmp_path)
    assert engine_config(parsed("demo", "--tensor-parallel-size", "2")).tensor_parallel_size == 2


def test_torch_is_not_imported_for_it() -> None:
    code = (
        "import sys; from quire.cli.main import main\n"
        "try: found = main(['serve', 'demo', '--tensor-parallel-size', '3'])\n"
        "except SystemExit as error: found = error.code\n"
        "assert found, found\n"
        "assert 'torch' not in sys.modules\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0 and "which 3 ranks cannot share equally" in ran.stderr, ran.stderr
