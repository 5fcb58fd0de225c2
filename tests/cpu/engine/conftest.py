"""A small random Llama with a small trained tokenizer, and transformers' view of it as the oracle."""

from __future__ import annotations

import pathlib

import pytest
import tokenizers
import torch
import transformers

from quire.engine.llm import LLM

TEXT = [
    "def add(a, b):\n    return a + b\n",
    "The quick brown fox jumps over the lazy dog. ",
    "0123456789 αβγ 漢字 🙂",
] * 3


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Folder of a float32 Llama: 2 layers, 4 heads on 2 KV heads, context 512."""
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
def oracle(checkpoint: pathlib.Path) -> transformers.LlamaForCausalLM:
    """transformers on the same files, float32."""
    return transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def llm(checkpoint: pathlib.Path) -> LLM:
    """One engine with a small pool and chunked prefill, shared by the tests."""
    return LLM(str(checkpoint), max_num_seqs=16, max_num_batched_tokens=48, num_gpu_blocks_override=129, device="cpu")
