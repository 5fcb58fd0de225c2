"""GGUF headers: what the package gguf writes is read; anything damaged is a LoadError, quickly and in little memory."""

from __future__ import annotations

import math
import os
import pathlib
import random
import struct
import time
import tracemalloc
from typing import Any

import gguf
import numpy as np
import pytest

from quire.config.arch import ModelArch
from quire.config.gguf import ARRAY, MAX_ITEMS, is_gguf, read_header
from quire.config.model import read_arch
from quire.config.rope import DIVIDED
from quire.core.errors import LoadError
from quire.text.tokenizer import HfTokenizer

KEYS: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.context_length": 128,
    "llama.embedding_length": 32,
    "llama.block_count": 2,
    "llama.feed_forward_length": 48,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 5e5,
    "llama.rope.dimension_count": 8,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "llama-bpe",
    "tokenizer.ggml.tokens": ["a", "b", "ab", "<|eot_id|>"],
    "tokenizer.ggml.token_type": [1, 1, 1, 3],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.bos_token_id": 0,
}
EMBEDDING = ("token_embd.weight", (32, 6), 0, bytes(32 * 6 * 4))
"""Name, dimensions (innermost first), type id, data."""
Tensors = list[tuple[str, tuple[int, ...], int, bytes]]


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def typed(value: Any) -> bytes:
    """Type id and value; bytes are taken as they are."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return struct.pack("<I", 8) + text(value)
    if isinstance(value, list):
        items = b"".join(typed(item)[4:] for item in value)
        return struct.pack("<I", ARRAY) + (typed(value[0])[:4] if value else b"\4\0\0\0") + count(value) + items
    if isinstance(value, bool):
        return struct.pack("<IB", 7, value)
    return struct.pack("<If", 6, value) if isinstance(value, float) else struct.pack("<II", 4, value)


def count(items: Any) -> bytes:
    return struct.pack("<Q", len(items))


def packed(pairs: dict[str, Any], tensors: Tensors, version: int = 3, magic: bytes = b"GGUF", shift: int = 0) -> bytes:
    """A file; `shift` is added to every offset."""
    head = magic + struct.pack("<I", version) + count(tensors) + count(pairs)
    head += b"".join(text(key) + typed(value) for key, value in pairs.items())
    data = b""
    for name, dims, kind, content in tensors:
        head += text(name) + struct.pack("<I", len(dims)) + struct.pack(f"<{len(dims)}Q", *dims)
        head += struct.pack("<IQ", kind, (len(data) + shift) % 2**64)
        data += content + bytes(-len(content) % 32)
    return head + bytes(-len(head) % 32) + data


def write(folder: pathlib.Path, tensors: Tensors | None = None, **changes: Any) -> pathlib.Path:
    """A small valid file with changed keys (None leaves one out; '__' stands for '.')."""
    pairs = KEYS | {key.replace("__", "."): value for key, value in changes.items()}
    path = folder / "m.gguf"
    path.write_bytes(packed({k: v for k, v in pairs.items() if v is not None}, [EMBEDDING] + (tensors or [])))
    return path


def refused(path: pathlib.Path, *parts: str) -> None:
    with pytest.raises(LoadError) as caught:
        read_arch(path)
    for part in parts:
        assert part in caught.value.message, caught.value.message
    assert len(caught.value.message) < 1000 and str(path) in caught.value.message


def refused_bytes(folder: pathlib.Path, data: bytes, *parts: str) -> None:
    path = folder / "m.gguf"
    path.write_bytes(data)
    refused(path, *parts)


def test_what_the_package_writes(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "w.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("a.u8", 255)
    writer.add_int64("a.i64", -(2**40))
    writer.add_float64("a.f64", 0.1)
    writer.add_bool("a.bool", True)
    writer.add_string("a.text", "é\n")
    writer.add_array("a.texts", ["x", "", "yy"])
    writer.add_array("a.numbers", [1, -2, 3])
    matrix = np.arange(6, dtype=np.float32).reshape(2, 3)
    writer.add_tensor("t.weight", matrix)
    writer.add_tensor("h.weight", matrix.astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    header = read_header(path)
    values = header.values
    assert (values["a.u8"], values["a.i64"], values["a.f64"]) == (255, -(2**40), 0.1)
    assert values["a.bool"] is True and values["a.text"] == "é\n"
    assert header.strings("a.texts") == ["x", "", "yy"] and header.strings("absent") == []
    assert header.numbers("a.numbers").tolist() == [1, -2, 3]
    tensor = header.tensors["t.weight"]
    assert (tensor.dtype, tensor.shape, header.tensors["h.weight"].dtype) == ("F32", (2, 3), "F16")
    assert header.floats(tensor) == [0, 1, 2, 3, 4, 5]
    for read, key in ((header.strings, "a.numbers"), (header.numbers, "a.texts"), (header.strings, "a.text")):
        with pytest.raises(LoadError, match=key):
            read(key)


def test_arch(tmp_path: pathlib.Path) -> None:
    arch = read_arch(write(tmp_path))
    assert (arch.family, arch.n_layers, arch.n_heads, arch.n_kv_heads, arch.head_dim) == ("llama", 2, 4, 2, 8)
    assert (arch.hidden_size, arch.ffn_size, arch.vocab_size, arch.tie_embeddings) == (32, 48, 6, True)
    assert (arch.max_position, arch.ropes[0].theta, arch.ropes[0].type) == (128, 5e5, "default")
    assert arch.eos_token_ids == (2, 3), "the stated one, and <|eot_id|> by its name"
    assert arch.bos_token_id == 0 and abs(arch.norm.eps - 1e-5) < 1e-10


@pytest.mark.parametrize(
    ("texts", "ids"),
    [
        (["<|end|>", "<|return|>", "x"], (2, 0, 1)),
        (["<|call|>", "<|end|>", "<|return|>", "<|endoftext|>"], (2, 0, 3)),
        (["<|call|>", "<|return|>", "<|end|>"], (0, 1)),
        (["<start_of_turn>", "<end_of_turn>", "<eos>"], (2, 1)),
    ],
)
def test_ends_of_turns(texts: list[str], ids: tuple[int, ...], tmp_path: pathlib.Path) -> None:
    """<|end|> by its name, but not beside both ends that gpt-oss has, where it is between messages of one turn."""
    keys = {"tokenizer__ggml__tokens": texts, "tokenizer__ggml__token_type": [3] * len(texts)}
    assert read_arch(write(tmp_path, **keys, tokenizer__ggml__merges=None)).eos_token_ids == ids


def test_the_end_of_a_turn_of_gemma_may_have_another_type(tmp_path: pathlib.Path) -> None:
    """As in Google's own files; other names end a turn as control tokens alone."""
    texts = ["</s>", "<end_of_turn>", "<eos>", "<|im_end|>"]
    keys = {"tokenizer__ggml__tokens": texts, "tokenizer__ggml__token_type": [1] * 4}
    assert read_arch(write(tmp_path, **keys, tokenizer__ggml__merges=None)).eos_token_ids == (2, 1)


def test_rope_and_windows(tmp_path: pathlib.Path) -> None:
    freqs = ("rope_freqs.weight", (4,), 0, struct.pack("<4f", 1, 2, 4, 8))
    rope = read_arch(write(tmp_path, [freqs])).ropes[0]
    assert (rope.type, rope.divisors) == (DIVIDED, (1, 2, 4, 8))
    assert read_arch(write(tmp_path, llama__rope__scaling__type="none")).ropes[0].type == "default"
    linear = {"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": 4.0}
    assert (read_arch(write(tmp_path, **linear)).ropes[0].factor, read_arch(write(tmp_path)).ropes[0].factor) == (4, 1)
    yarn = {"llama__rope__scaling__type": "yarn", "llama__rope__scaling__factor": 4.0}
    for extra, factor in (({}, 1.0), ({"llama__rope__scaling__attn_factor": 0.5}, 0.5)):
        rope = read_arch(write(tmp_path, **yarn, **extra, llama__rope__scaling__original_context_length=32)).ropes[0]
        assert (rope.type, rope.factor, rope.original_max_position) == ("yarn", 4, 32)
        assert abs(rope.attention_factor - factor * (0.1 * math.log(4) + 1)) < 1e-6
    window = read_arch(write(tmp_path, llama__attention__sliding_window=16))
    assert (window.family, window.windows) == ("mistral", (16, 16))
    assert read_arch(write(tmp_path, llama__attention__sliding_window=128)).windows == (0, 0)
    for bad in (float("nan"), 0.0, -1.0, float("inf")):
        refused(write(tmp_path, [("rope_freqs.weight", (4,), 0, struct.pack("<4f", 1, 2, bad, 8))]), "rope_freqs")
    refused(write(tmp_path, [("rope_freqs.weight", (2,), 0, bytes(8))]), "rope_freqs.weight", "(4,)")
    refused(write(tmp_path, [freqs], **linear), "both rope_freqs.weight and rope scaling")
    other = {key.replace("llama.", "smollm3."): value for key, value in KEYS.items()} | {"smollm3.block_count": 4}
    path = tmp_path / "m.gguf"
    path.write_bytes(packed(other | {"general.architecture": "smollm3"}, [EMBEDDING, freqs]))
    assert [layer.mixer.rope is None for layer in read_arch(path).layers] == [False, False, False, True]
    odd = {"llama__attention__key_length": float("nan"), "llama__rope__dimension_count": None}
    refused(write(tmp_path, **odd), "attention.key_length")


@pytest.mark.parametrize(
    ("key", "value", "parts"),
    [
        ("general.architecture", "mamba", ("'mamba' is not supported.", "llama, qwen2, qwen3", "Take a checkpoint")),
        ("general.architecture", "qwen2vl", ("Nearest to it are qwen2, qwen3 and qwen2moe, which are others.",)),
        ("general.architecture", 7, ("general.architecture: the architecture 7",)),
        ("general.architecture", None, ("general.architecture",)),
        ("llama.attention.head_count", 0, ("llama.attention.head_count",)),
        ("llama.attention.head_count", 2**31, ("llama.attention.head_count",)),
        ("llama.attention.head_count", [4, 4], ("llama.attention.head_count",)),
        ("llama.attention.head_count_kv", 3, ("llama.attention.head_count_kv",)),
        ("llama.attention.head_count_kv", 0, ("llama.attention.head_count_kv",)),
        ("llama.block_count", 2**31, ("llama.block_count",)),
        ("llama.block_count", None, ("llama.block_count is missing",)),
        ("llama.embedding_length", "x" * 9999, ("llama.embedding_length",)),
        ("llama.feed_forward_length", 2**31, ("llama.feed_forward_length",)),
        ("llama.context_length", 0, ("llama.context_length",)),
        ("llama.attention.layer_norm_rms_epsilon", float("nan"), ("layer_norm_rms_epsilon",)),
        ("llama.rope.freq_base", 0.0, ("llama.rope.freq_base",)),
        ("llama.rope.freq_base", float("inf"), ("llama.rope.freq_base",)),
        ("llama.rope.dimension_count", 4, ("llama.rope.dimension_count = 4 must be 8",)),
        ("llama.rope.scaling.type", "longrope", ("llama.rope.scaling.type", "longrope")),
        ("llama.rope.scaling.type", "linear", ("llama.rope.scaling.factor",)),
        ("llama.expert_count", 8, ("llama.expert_used_count is missing",)),
        ("llama.attention.key_length", 7, ("llama.attention.key_length",)),
        ("tokenizer.ggml.eos_token_id", 6, ("eos_token_id",)),
        ("split.count", 3, ("split.count", "--merge")),
        ("general.alignment", 24, ("general.alignment = 24",)),
        ("general.alignment", 0, ("general.alignment = 0",)),
        ("general.alignment", 2**31, ("general.alignment",)),
    ],
)
def test_refused_keys(key: str, value: Any, parts: tuple[str, ...], tmp_path: pathlib.Path) -> None:
    rope = {"llama__rope__dimension_count": None} if "key_length" in key or "head_count" in key else {}
    refused(write(tmp_path, **rope, **{key.replace(".", "__"): value}), *parts)


def test_refused_containers(tmp_path: pathlib.Path) -> None:
    array = struct.pack("<I", ARRAY)
    refused_bytes(tmp_path, b"", "truncated")
    refused_bytes(tmp_path, packed(KEYS, [EMBEDDING], magic=b"GGML"), "is not a GGUF file")
    refused_bytes(tmp_path, packed(KEYS, [EMBEDDING], version=1), "has GGUF version 1; supported are versions 2 and 3")
    refused_bytes(tmp_path, packed(KEYS, [EMBEDDING], version=3 << 24), "big-endian")
    refused_bytes(tmp_path, b"GGUF" + struct.pack("<IQQ", 3, 2**63, 1), "tensors; the limit is")
    refused_bytes(tmp_path, b"GGUF" + struct.pack("<IQQ", 3, 1, 2**63), "metadata pairs; the limit is")
    refused_bytes(tmp_path, b"GGUF" + struct.pack("<IQQ", 3, 1, 1) + struct.pack("<Q", 2**63), "bytes; the limit is")
    nested = array + array * 5000 + struct.pack("<Q", 1)
    refused_bytes(tmp_path, packed({"a": nested}, []), "array of arrays")
    for n_items in (MAX_ITEMS + 1, 2**64 - 1):
        refused_bytes(tmp_path, packed({"a": array + struct.pack("<IQ", 4, n_items)}, []), "items; the limit is")
    for kind in (4, 8):
        refused_bytes(tmp_path, packed({"a": array + struct.pack("<IQ", kind, 10**6)}, []), "truncated or damaged")
    long = array + struct.pack("<IQQ", 8, 2, 2**60) + bytes(99)
    refused_bytes(tmp_path, packed({"a": long}, []), "truncated or damaged")
    refused_bytes(tmp_path, packed({"a": struct.pack("<I", 99)}, []), "unknown value type 99")
    refused_bytes(tmp_path, packed({"a": array + struct.pack("<IQ", 99, 0)}, []), "unknown value type 99")
    refused_bytes(tmp_path, packed({"a": struct.pack("<IB", 7, 2)}, []), "a bool with the byte 2")
    refused_bytes(tmp_path, packed({"a": struct.pack("<I", 8) + text(b"\xff\xfe")}, []), "not valid UTF-8")
    refused_bytes(tmp_path, packed({"x" * 257: 1}, []), "257 bytes; the limit is 256")
    twice = packed({"ab": 1, "ac": 2}, []).replace(text("ac"), text("ab"))
    refused_bytes(tmp_path, twice, "repeats the metadata key 'ab'")
    bad_item = array + struct.pack("<IQ", 8, 1) + text(b"\xff")
    refused(write(tmp_path, tokenizer__ggml__tokens=bad_item), "an item of tokenizer.ggml.tokens is not valid UTF-8")


def test_refused_tensors(tmp_path: pathlib.Path) -> None:
    def tensors(*items: tuple[str, tuple[int, ...], int, bytes], shift: int = 0) -> bytes:
        return packed(KEYS, list(items), shift=shift)

    refused_bytes(tmp_path, tensors(EMBEDDING, EMBEDDING), "repeats the tensor 'token_embd.weight'")
    refused_bytes(tmp_path, tensors(), "token_embd.weight")
    refused_bytes(tmp_path, tensors(("token_embd.weight", (32,), 0, bytes(128))), "token_embd.weight")
    for dims in ((), (1, 1, 1, 1, 1)):
        refused_bytes(tmp_path, tensors(("a", dims, 0, bytes(4))), "dimensions; from 1 to 4")
    for dims in ((2**63, 2**63), (2**40, 2**40), (0, 5), (2**64 - 1,)):
        refused_bytes(tmp_path, tensors(("a", dims, 0, b"")), "sizes >= 1")
    refused_bytes(tmp_path, tensors(("a", (2**32,), 0, b"")), "is truncated")
    refused_bytes(tmp_path, tensors(("a", (33, 32), 8, b"")), "a multiple of 32")
    refused_bytes(tmp_path, tensors(("a", (32, 1), 16, b"")), "IQ2_XXS (id 16)", "F32, F16, Q4_0, ", "BF16")
    refused_bytes(tmp_path, tensors(("a", (32, 1), 1000, b"")), "unsupported type of id 1,000")
    for shift in (32, 1, -32, 2**63, -1):
        refused_bytes(tmp_path, tensors(EMBEDDING, shift=shift), "has offset")
    overlapping = tensors(EMBEDDING, ("tail", (64,), 0, bytes(256)))
    at = overlapping.index(text("tail")) + len(text("tail")) + 4 + 8 + 4
    refused_bytes(tmp_path, overlapping[:at] + struct.pack("<Q", 0) + overlapping[at + 8 :], "has offset")


def test_files_that_are_none(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "m.gguf"
    refused(path, "No such file")
    os.mkfifo(path)
    refused(path, "not a regular file")
    path.unlink()
    path.symlink_to("/dev/zero")
    refused(path, "not a regular file")
    path.unlink()
    path.mkdir()
    assert not is_gguf(path) and is_gguf(tmp_path / "X.GGUF")


def test_changed_after_its_header_was_read(tmp_path: pathlib.Path) -> None:
    header = read_header(write(tmp_path))
    write(tmp_path, llama__block_count=3)
    os.utime(header.path, ns=(0, 0))
    with pytest.raises(LoadError, match="changed while being loaded"):
        header.strings("tokenizer.ggml.tokens")
    assert read_arch(header.path).n_layers == 3


SENTENCE_PIECE: dict[str, Any] = {
    "tokenizer__ggml__model": "llama",
    "tokenizer__ggml__tokens": ["<unk>", "a", "aa", "<0x41>", "<s>", ""],
    "tokenizer__ggml__scores": [0.0, -1.0, -2.0, 0.0, 0.0, 0.0],
    "tokenizer__ggml__token_type": [2, 1, 1, 6, 3, 5],
    "tokenizer__ggml__unknown_token_id": 5,
    "tokenizer__ggml__merges": None,
}


def attempt(path: pathlib.Path) -> str:
    """What reading the whole of a file came to; anything but a LoadError, and ConfigError of the tokenizer, fails."""
    try:
        arch = read_arch(path)
        assert isinstance(arch, ModelArch)
        HfTokenizer.load(path, arch.vocab_size)
    except LoadError:
        return "refused"
    return "read"


def test_every_truncation(tmp_path: pathlib.Path) -> None:
    whole = write(tmp_path).read_bytes()
    path = tmp_path / "cut.gguf"
    for n_bytes in range(0, len(whole), 3):
        path.write_bytes(whole[:n_bytes])
        assert attempt(path) == "refused", n_bytes


@pytest.mark.parametrize("keys", [{}, SENTENCE_PIECE], ids=["gpt2", "llama"])
def test_flipped_bytes(keys: dict[str, Any], tmp_path: pathlib.Path) -> None:
    """Some flips change a harmless number; none may crash, hang or take much memory."""
    whole = write(tmp_path, **keys).read_bytes()
    assert attempt(tmp_path / "m.gguf") == "read"
    path, chance, found = tmp_path / "flip.gguf", random.Random(0), {"read": 0, "refused": 0}
    tracemalloc.start()
    started_s = time.monotonic()
    for round_number in range(400):
        damaged = bytearray(whole)
        for _ in range(chance.choice((1, 1, 2, 8))):
            damaged[chance.randrange(len(whole) - len(EMBEDDING[3]))] = chance.randrange(256)
        path.write_bytes(damaged)
        os.utime(path, ns=(round_number, round_number))
        found[attempt(path)] += 1
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found["read"] > 20 and found["refused"] > 100, found
    assert peak < 64 << 20 and time.monotonic() - started_s < 60
