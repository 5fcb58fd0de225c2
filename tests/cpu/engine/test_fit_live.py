"""Models that do not fit, through the real engine and the real server: refused before weights are read, in lines."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
import time

import pytest

from quire.bench.shape import FOLDER
from quire.core.errors import ConfigError
from quire.engine.llm import LLM

HUGE = {"hidden_size": 16384, "intermediate_size": 65536, "num_hidden_layers": 400, "num_attention_heads": 128}
"""4 TiB in bfloat16: more than the machine of any test."""


@pytest.fixture
def huge(tmp_path: pathlib.Path) -> pathlib.Path:
    config = json.loads((FOLDER / "llama-3.1-8b/config.json").read_text()) | HUGE
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_dummy_weights_are_refused_at_once(huge: pathlib.Path) -> None:
    start_s = time.monotonic()
    with pytest.raises(ConfigError, match="does not fit") as caught:
        LLM(str(huge), load_format="dummy", skip_tokenizer_init=True, device="cpu")
    assert time.monotonic() - start_s < 30, "it would take hours to fill them"
    assert caught.value.code == "does_not_fit"
    names = [line.split("  ")[1].strip() for line in caught.value.message.splitlines() if line.startswith("  ")]
    assert names[:4] == ["weights", "KV, at least", "activations", "sum"] and "held by others" in names


def test_a_checkpoint_is_refused_by_its_header(huge: pathlib.Path) -> None:
    """A sparse file with the header of one that is larger than memory."""
    config = json.loads((huge / "config.json").read_text())
    config |= {"num_hidden_layers": 1, "vocab_size": 2**22, "hidden_size": 2**20, "tie_word_embeddings": True}
    config |= {"intermediate_size": 64, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 64}
    (huge / "config.json").write_text(json.dumps(config))
    h, block = 2**20, "model.layers.0."
    shapes = {
        "model.embed_tokens.weight": [2**22, h], "model.norm.weight": [h], block + "input_layernorm.weight": [h],
        block + "post_attention_layernorm.weight": [h], block + "self_attn.o_proj.weight": [h, 64],
        **{f"{block}self_attn.{part}_proj.weight": [64, h] for part in "qkv"},
        **{f"{block}mlp.{part}_proj.weight": [64, h] for part in ("gate", "up")},
        block + "mlp.down_proj.weight": [h, 64],
    }  # fmt: skip
    header, end = {}, 0
    for name, shape in shapes.items():
        n_bytes = 2 * shape[0] * (shape[1] if len(shape) == 2 else 1)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + n_bytes]}
        end += n_bytes
    text = json.dumps(header).encode()
    with open(huge / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    with pytest.raises(ConfigError, match="does not fit"):
        LLM(str(huge), skip_tokenizer_init=True, device="cpu")


LIMITED = """
import resource, sys
from quire.core import host
from quire.core.errors import ConfigError
from quire.engine.llm import LLM
from quire.core.sampling import SamplingParams
import quire.compute.weights.loader
mapped = host._own(host.ROOT)[0]
resource.setrlimit(resource.RLIMIT_AS, (mapped + int(sys.argv[1]), resource.RLIM_INFINITY))
options = {"load_format": "dummy", "skip_tokenizer_init": True} if sys.argv[2] else {}
llm = LLM(sys.argv[2], device="cpu", num_gpu_blocks_override=65, max_num_seqs=4, num_threads=1, **options)
print(llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4, temperature=0), use_tqdm=False)[0].outputs[0].token_ids)
"""


def limited(n_bytes: int, model: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", LIMITED, str(n_bytes), model]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


def test_under_a_limit_on_address_space() -> None:
    """1.1 GiB of weights with 1 GiB left: refused by the table, not by an allocation that fails. The bundled model with
    6 GiB left answers."""
    done = limited(1 << 30, str(FOLDER / "qwen3-0.6b"))
    assert done.returncode != 0 and "does not fit" in done.stderr and "ulimit -v" in done.stderr, done.stderr
    done = limited(6 << 30, "")
    assert done.returncode == 0 and done.stdout.startswith("["), done.stderr


def test_a_server_prints_the_table_in_lines(huge: pathlib.Path) -> None:
    command = [sys.executable, "-m", "quire", "serve", str(huge), "--load-format", "dummy", "--skip-tokenizer-init"]
    done = subprocess.run(
        [*command, "--device", "cpu", "--port", "0"], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 2, done.stderr
    lines = done.stderr.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("quire: error:"))
    assert [line.split()[0] for line in lines[first + 1 : first + 5]] == ["weights", "KV,", "activations", "sum"]
