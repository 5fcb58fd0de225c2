"""Shared by all tests: GPU tests are skipped where no GPU is; a small checkpoint with transformers as its oracle."""

from __future__ import annotations

import pathlib
import shutil
import signal
import subprocess
from typing import Any

import pytest

TEXT = [
    "def add(a, b):\n    return a + b\n",
    "The quick brown fox jumps over the lazy dog. ",
    "0123456789 αβγ 漢字 🙂",
] * 3


def pytest_configure(config: pytest.Config) -> None:
    """Ctrl-C tests need children that hear it, also when this run was started in the background with SIGINT ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if shutil.which("nvidia-smi") and subprocess.run(["nvidia-smi"], capture_output=True, check=False).returncode == 0:
        return
    for item in items:
        if item.get_closest_marker("gpu") or "gpu" in pathlib.Path(item.fspath).parts:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Folder of a float32 Llama: 2 layers, 4 heads on 2 KV heads, context 512."""
    import tokenizers
    import torch
    import transformers

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("tiny-llama")
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(TEXT, vocab_size=320, special_tokens=["<|end|>"], show_progress=False)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer, eos_token="<|end|>")
    fast.chat_template = (
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    fast.save_pretrained(folder)
    config = transformers.LlamaConfig(
        vocab_size=len(fast),
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=None,
    )
    transformers.LlamaForCausalLM(config).eval().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def oracle(checkpoint: pathlib.Path) -> Any:
    """transformers on the same files, float32."""
    import torch
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
