"""A GGUF file through the whole engine: text in, the tokens of transformers out; the tokenizer is the file's own."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
from typing import Any

import pytest
import torch
import transformers

from quire.core.errors import ConfigError
from quire.core.sampling import SamplingParams
from quire.engine.llm import LLM

TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}<assistant>"


@pytest.fixture(scope="module")
def gguf_path(
    checkpoint: pathlib.Path, tmp_path_factory: pytest.TempPathFactory, oracle: transformers.LlamaForCausalLM
) -> pathlib.Path:
    """The small checkpoint with its tokenizer as one file."""
    import gguf_files

    model = json.loads((checkpoint / "tokenizer.json").read_text())["model"]
    tokens = sorted(model["vocab"], key=lambda token: model["vocab"][token])
    keys = {
        "ggml.model": "gpt2",
        "ggml.pre": "gpt-2",
        "ggml.tokens": tokens,
        "ggml.token_type": [3 if token == "<|end|>" else 1 for token in tokens],
        "ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "ggml.eos_token_id": 0,
        "chat_template": TEMPLATE,
    }
    path: pathlib.Path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    gguf_files.write_gguf(path, oracle, "llama", tokens=keys)
    return path


def test_text_and_chat(gguf_path: pathlib.Path, checkpoint: pathlib.Path, oracle: Any) -> None:
    theirs = transformers.AutoTokenizer.from_pretrained(checkpoint)
    texts = ["def add(a, b):\n", "The quick brown", "0123 αβγ 漢字 🙂"]
    llm = LLM(str(gguf_path), max_num_seqs=4, num_gpu_blocks_override=65, device="cpu")
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    messages = [{"role": "user", "content": "lazy dog"}]
    outputs = [*llm.generate(texts, params, use_tqdm=False), *llm.chat(messages, params, use_tqdm=False)]
    llm.shutdown()
    for text, output in zip([*texts, "<user>lazy dog\n<assistant>"], outputs, strict=True):
        ids = theirs(text, add_special_tokens=False).input_ids
        assert output.prompt_token_ids == ids
        prompt = torch.tensor([ids])
        mask = torch.ones_like(prompt)
        expected = oracle.generate(
            prompt, attention_mask=mask, max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0
        )[0, len(ids) :].tolist()
        assert output.outputs[0].token_ids == expected
        assert output.outputs[0].text == theirs.decode(expected, skip_special_tokens=True)


def test_load_format(gguf_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match="is a GGUF file: leave it at auto"):
        LLM(str(gguf_path), load_format="safetensors", device="cpu")


def test_without_the_package_gguf(gguf_path: pathlib.Path) -> None:
    """The command line, in a process where importing the package would fail."""
    code = (
        "import sys; sys.modules['gguf'] = None; sys.modules['transformers'] = None\n"
        "from quire.cli.main import main\n"
        f"sys.exit(main(['generate', {str(gguf_path)!r}, '--prompt', 'The quick', '--max-tokens', '4']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr


def test_damaged(gguf_path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """One line on standard error, no traceback."""
    path = tmp_path / "cut.gguf"
    path.write_bytes(gguf_path.read_bytes()[:-40_000])
    command = [sys.executable, "-m", "quire", "generate", str(path), "--prompt", "x"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode != 0 and "is truncated" in done.stderr and "Traceback" not in done.stderr, done.stderr
