"""Loading tokenizers, good and bad, and what a token stands for."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
from small_tokenizers import byte_fallback, byte_level, word_piece
from transformers import PreTrainedTokenizerFast

from quire.core.errors import ConfigError, InvalidParameter, LoadError
from quire.text.tokenizer import HfTokenizer

TEXTS = ["hello world", "", " ", "the 日本語 😀!\n\n", "def f(x):\n\treturn 'é'", "<tool>a b</s>", "e\u0301\u200d"]


@pytest.mark.parametrize("build", [byte_level, byte_fallback])
def test_encode_and_decode_equal_transformers(build: Any, make_folder: Any) -> None:
    folder = make_folder(build(), {"bos_token": "<s>", "eos_token": "</s>"})
    ours = HfTokenizer.load(folder)
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), bos_token="<s>", eos_token="</s>")
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == theirs.encode(text)
        for skip in (False, True):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert (ours.bos_id, ours.eos_id, len(ours)) == (theirs.bos_token_id, theirs.eos_token_id, len(theirs))
    assert ours.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert ours.token_id("</s>") == ours.eos_id


@pytest.mark.parametrize("config", [{"add_bos_token": True}, {"add_bos_token": True, "add_eos_token": True}, {}])
def test_bos_and_eos_are_added_as_the_config_says(config: dict[str, Any], make_folder: Any) -> None:
    names = {"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": "</s>"}
    folder = make_folder(byte_level(), names | config)
    ours = HfTokenizer.load(folder)
    theirs = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), bos_token="<s>", eos_token="</s>", **config
    )
    assert ours.encode("hello") == theirs.encode("hello")
    assert ours.encode("hello", add_special_tokens=False) == theirs.encode("hello", add_special_tokens=False)
    assert (ours.encode("hello")[0] == ours.bos_id) == bool(config)


def test_truncation_and_padding_of_the_file_are_ignored(make_folder: Any) -> None:
    tokenizer = byte_level()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=50)
    loaded = HfTokenizer.load(make_folder(tokenizer))
    assert loaded.decode(loaded.encode("hello world, the quick")) == "hello world, the quick"


def test_bytes_of_each_token_equal_the_library(make_folder: Any) -> None:
    tokenizer = HfTokenizer.load(make_folder(byte_level()))
    for token_id in range(len(tokenizer)):
        assert tokenizer.token_text(token_id) == tokenizer.decode([token_id], skip_special_tokens=False)
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode("日本 é"))) == "日本 é".encode()


def test_bytes_of_sentencepiece_tokens(make_folder: Any) -> None:
    tokenizer = HfTokenizer.load(make_folder(byte_fallback()))
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode("he😀 é"))) == " he😀 é".encode()


def test_ids_without_a_string_are_empty(make_folder: Any) -> None:
    tokenizer = HfTokenizer.load(make_folder(byte_level()))
    for token_id in (len(tokenizer), 2**31, 2**40, -1):
        assert tokenizer.token_bytes(token_id) == b""
    pieces = tokenizer.pieces(True)
    assert pieces is not None
    n_before = len(pieces)
    assert pieces[10**6] == b"" and len(pieces) == n_before, "unknown ids must not fill the memory"


def test_special_tokens_can_be_skipped(make_folder: Any) -> None:
    tokenizer = HfTokenizer.load(make_folder(byte_level(), {"eos_token": "<|end|>"}))
    ids = tokenizer.encode("hello<tool><|end|>")
    assert tokenizer.decode(ids) == "hello<tool>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "hello<tool><|end|>"
    assert tokenizer.eos_id in tokenizer.special_ids


def test_neighbour_dependent_decoders_have_no_pieces(make_folder: Any) -> None:
    assert HfTokenizer.load(make_folder(word_piece())).pieces(True) is None


def test_unpaired_surrogates_are_refused(make_folder: Any) -> None:
    with pytest.raises(InvalidParameter, match=r"^prompt = 'a\\ud800b' is not allowed: .* surrogates"):
        HfTokenizer.load(make_folder(byte_level())).encode("a\ud800b")


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"model": 3}', '{"model": {"type": "Magic"}}', "\x00\xff"])
def test_damaged_files_are_refused(content: str, make_folder: Any) -> None:
    with pytest.raises(LoadError, match=r"tokenizer\.json"):
        HfTokenizer.load(make_folder(content))


@pytest.mark.parametrize("content", ["{", "[1]", "[" * 100_000])
def test_a_damaged_config_is_refused(content: str, make_folder: Any) -> None:
    with pytest.raises(LoadError, match="tokenizer_config"):
        HfTokenizer.load(make_folder(byte_level(), content))


def test_truncated_and_patched_files_never_load_by_halves(make_folder: Any) -> None:
    text = byte_level().to_str()
    for part in (0.3, 0.7, 0.999):
        with pytest.raises(LoadError):
            HfTokenizer.load(make_folder(text[: int(len(text) * part)]))


@pytest.mark.parametrize("change", ["id", "content"])
def test_duplicate_added_tokens_are_refused(change: str, make_folder: Any) -> None:
    parts = json.loads(byte_level().to_str())
    first, second = parts["added_tokens"][0], parts["added_tokens"][1]
    second[change] = first[change]
    with pytest.raises(LoadError, match="two"):
        HfTokenizer.load(make_folder(json.dumps(parts)))


def test_a_tokenizer_larger_than_the_embedding_is_refused(make_folder: Any) -> None:
    folder = make_folder(byte_level())
    n_tokens = len(HfTokenizer.load(folder))
    HfTokenizer.load(folder, n_embeddings=n_tokens)
    with pytest.raises(ConfigError, match=f"embeds only {n_tokens - 1}"):
        HfTokenizer.load(folder, n_embeddings=n_tokens - 1)


def test_sentencepiece_only_checkpoints_say_what_to_do(make_folder: Any) -> None:
    folder: pathlib.Path = make_folder(None)
    (folder / "tokenizer.model").write_bytes(b"\x0a")
    with pytest.raises(ConfigError, match=r"only tokenizer\.model.*save_pretrained"):
        HfTokenizer.load(folder)
    with pytest.raises(ConfigError, match="no tokenizer file"):
        HfTokenizer.load(make_folder(None))


def test_a_pattern_that_backtracks_is_refused(make_folder: Any, capfd: pytest.CaptureFixture[str]) -> None:
    parts = json.loads(byte_level().to_str())
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    parts["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, parts["pre_tokenizer"]]}
    with pytest.raises(ConfigError, match="backtracks"):
        HfTokenizer.load(make_folder(json.dumps(parts)))
    capfd.readouterr()  # the library writes its own complaint to stderr
