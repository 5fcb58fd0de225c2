"""What ranks cannot share, a length that the model has not, and a rounding that the device does not do, is said from
the command line and config.json, before torch is imported."""

from __future__ import annotations

import argparse
import contextlib
import json
import pathlib
import re
import subprocess
import sys

import pytest

from quire.cli.model import add_engine_flags, engine_config, simulated_config
from quire.config.flags import FlagParser
from quire.core.errors import ConfigError


def parsed(*words: str) -> argparse.Namespace:
    parser = FlagParser()
    add_engine_flags(parser)
    return parser.parse_args(list(words))


@pytest.mark.parametrize("words, message", [
    (("demo", "--tensor-parallel-size", "3"),
     r"^tensor_parallel_size = 3: a feed-forward is 1024 wide, which 3 ranks cannot .* \(2, 4 work\)"),
    (("demo", "--tensor-parallel-size", "2", "--enable-expert-parallel"), "llama has no experts"),
    (("demo", "--enable-expert-parallel"), "llama has no experts"),
    (("demo", "--ulysses-degree", "2"), "ulysses_degree = 2 and prefill_context_parallel_size = 1: .*-size 2 or more"),
    (("demo", "--context-parallel-method", "ring", "-tp", "2"), "context_parallel_method = 'ring' and .* leave"),
    (("shape:qwen3-0.6b", "--pipeline-parallel-size", "40"), "qwen3 has 28 layers, and each stage needs one"),
    (("shape:qwen3-0.6b", "-pp", "2", "--pp-layer-partition", "20,9"),
     r"^pp_layer_partition = '20,9': 20 \+ 9 = 29, and qwen3 has 28 layers\. .* such as 14,14$"),
    (("shape:qwen3-0.6b", "--pp-layer-partition", "14,14"), r"2 numbers, and pipeline_parallel_size = 1\. Add"),
    (("demo", "--pp-layer-partition", "4,4", "--device", "null"), "pp_layer_partition = '4,4' and device = 'null'"),
    (("shape:mamba2-2.7b", "--tensor-parallel-size", "3"), "Mamba-2 has 80 heads, which 3 ranks cannot share equally"),
    (("demo", "--data-parallel-size", "2", "--pipeline-parallel-size", "2"), "data-parallel ranks have no stages yet"),
    (("demo", "-tp", "2", "--deterministic"),
     "be promised with tensor_parallel_size = 2: the order .*; take one rank or --data-parallel-size, or leave"),
    (("org/name", "-pcp", "2", "--deterministic"), "with prefill_context_parallel_size = 2: whether the tokens of a"),
    (("org/name", "-dp", "2", "--enable-expert-parallel", "--deterministic"),
     "with data_parallel_size = 2 and enable_expert_parallel = True: the order .*; take one rank, or leave"),
    (("demo", "-tp", "2", "--device", "null"), "tensor_parallel_size = 2 and device = 'null', which has no model"),
    (("demo", "-pcp", "2", "--device", "null"), "device = 'null'.* leave --prefill-context-parallel-size out, or"),
])  # fmt: skip
def test_what_cannot_be_divided(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        engine_config(parsed(*words))


def test_what_ranks_of_their_own_sums_promise() -> None:
    for words in (("-dp", "2"), ("-pp", "2"), ("-tp", "1")):
        assert engine_config(parsed("demo", *words, "--deterministic")).deterministic


def test_what_is_not_here_is_left_to_the_engine(tmp_path: pathlib.Path) -> None:
    """A hub's model, a folder that is none of a model's, and an engine that computes nothing."""
    three = ("--tensor-parallel-size", "3")
    assert engine_config(parsed("org/name", *three)).tensor_parallel_size == 3
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Unknown"]}))
    assert engine_config(parsed(str(tmp_path), *three)).model == str(tmp_path)
    assert engine_config(parsed("demo", "--tensor-parallel-size", "2")).tensor_parallel_size == 2


def test_a_length_that_the_model_has_not() -> None:
    """Nor an engine that computes nothing; as many as there are positions are right."""
    said = "max_model_len = 2049 exceeds the 2048 positions of this model: lower it, or add rope scaling to config.json"
    for more in ((), ("--device", "null")):
        with pytest.raises(ConfigError, match=said):
            engine_config(parsed("demo", "--max-model-len", "2049", *more))
    assert engine_config(parsed("demo", "--max-model-len", "2048")).max_model_len == 2048
    scaled = '{"rope_scaling": {"type": "linear", "factor": 2.0}}'
    found = engine_config(parsed("demo", "--max-model-len", "2049", "--hf-overrides", scaled))
    assert found.max_model_len == 2049


@pytest.mark.parametrize("device, quantization, said", [
    ("cpu", "fp8", "quantization = 'fp8' works on GPUs only and the device is cpu: leave --quantization out"),
    ("cuda", "int8-g32", "quantization = 'int8-g32' works on the CPU only and the device is cuda: add --device cpu"),
    ("auto", "fp8", ""), ("cpu", "int8-g32", ""), ("cuda", "fp8", ""), ("cpu", "none", ""),
])  # fmt: skip
def test_a_rounding_that_the_device_does_not_do(device: str, quantization: str, said: str) -> None:
    """Which device auto is, torch must tell; a simulation has its own."""
    words = parsed("demo", "--device", device, "--quantization", quantization)
    with pytest.raises(ConfigError, match=re.escape(said)) if said else contextlib.nullcontext():
        assert engine_config(words).quantization == quantization
    assert simulated_config(words).quantization == quantization


@pytest.mark.parametrize("words, said", [
    (("--device", "cpu", "--quantization", "fp8"), "--quantization 'fp8' works on GPUs only and the device is cpu"),
    (("--tensor-parallel-size", "3"), "which 3 ranks cannot share equally"),
    (("--max-model-len", "2049"), "--max-model-len 2049 exceeds the 2048 positions"),
])  # fmt: skip
def test_torch_is_not_imported_for_it(words: tuple[str, ...], said: str) -> None:
    code = (
        "import sys; from quire.cli.main import main\n"
        f"try: found = main(['serve', 'demo', *{words!r}])\n"
        "except SystemExit as error: found = error.code\n"
        "assert found, found\n"
        "assert 'torch' not in sys.modules\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0 and said in ran.stderr, ran.stderr
    assert "loading torch" not in ran.stderr, "nor by the engine's process"
