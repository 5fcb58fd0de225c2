"""Tokenizers of GGUF files against the vocabulary's own library, transformers' reading of the file, and refusals."""

from __future__ import annotations

import io
import json
import pathlib
import random
from typing import Any

import gguf
import pytest
import sentencepiece
import tokenizers
import transformers
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from quire.core.errors import LoadError
from quire.text.chat_template import ChatTemplate
from quire.text.origin import Origin, TracedText
from quire.text.tokenizer import HfTokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It's what they'LL say, isn't it? I've been there.",
    "def add(a, b):\n    return a + b  # 1234567 + 89\n\n\nclass Name(Base):\n\tpass\r\n",
    "Größe, café, naïve, Ελληνικά, русский язык, 漢字かな交じり文, 한국어, ไทย, العربية, 🙂👍🏽",
    "HTTPServer getURLFor CamelCase snake_case $100 <b>x</b> a/b/c ... !!! ---",
] * 5
TEXTS = [
    *CORPUS[:4], "", " ", "  two  spaces  ", "\n\n \n x", "don't DON'T we'Re", "12345678901", "a\u0301 cafe\u0301",
    "tab\tand  nbsp\u00a0x", "zażółć gęślą jaźń", "\u200d🙂 \U0001f9d1\u200d\U0001f680", "x" * 300,
    "<|end|>hello<|end|> <think> y</think>",
]  # fmt: skip
CONTROL, USER_DEFINED, NORMAL = 3, 4, 1


def write(path: pathlib.Path, architecture: str = "llama", **keys: Any) -> pathlib.Path:
    """A file of tokenizer.* keys and no tensors; '__' stands for '.'."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in keys.items():
        name = "tokenizer." + key.replace("__", ".")
        if isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        else:
            writer.add_string(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def byte_level(split: str) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """A trained vocabulary with two added tokens, and its keys."""
    backend = tokenizers.Tokenizer(models.BPE())
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(tokenizers.Regex(split), behavior="isolated"), level]
    )
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    )
    backend.add_special_tokens(["<|end|>"])
    backend.add_tokens([tokenizers.AddedToken("<think>", normalized=False)])
    vocab = backend.get_vocab()
    tokens = sorted(vocab, key=lambda token: vocab[token])
    merges = tokenizers_merges(backend)
    types = [CONTROL if token == "<|end|>" else USER_DEFINED if token == "<think>" else NORMAL for token in tokens]
    return backend, {
        "ggml__model": "gpt2", "ggml__tokens": tokens, "ggml__token_type": types, "ggml__merges": merges,
        "ggml__eos_token_id": vocab["<|end|>"], "ggml__bos_token_id": vocab["<|end|>"],
    }  # fmt: skip


def tokenizers_merges(backend: tokenizers.Tokenizer) -> list[str]:
    return [" ".join(pair) for pair in json.loads(backend.to_str())["model"]["merges"]]


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "deepseek-r1-qwen", "tekken", "gpt-4o", "smaug-bpe"])
def test_byte_level(pre: str, tmp_path: pathlib.Path) -> None:
    backend, keys = byte_level(GGUF_PRE_TOKENIZER_SPLITS[pre])
    path = write(tmp_path / "m.gguf", ggml__pre=pre, ggml__add_bos_token=False, **keys)
    found = HfTokenizer.load(path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    for text in TEXTS:
        if pre == "qwen2" and "\u0301" in text:  # the model's own tokenizer normalises, llama.cpp does not
            assert found.encode(text) == found.encode("\u00e1 caf\u00e9")
            continue
        ids = found.encode(text)
        assert ids == backend.encode(text).ids, text
        assert ids == theirs(text, add_special_tokens=False).input_ids, text
        assert found.decode(ids, skip_special_tokens=False) == text
        pieces = found.pieces(skip_special_tokens=False)
        assert pieces is not None and b"".join(pieces[i] for i in ids).decode() == text
    assert found.decode(found.encode("a<|end|>b<think>")) == "ab<think>"
    assert found.special_ids == {found.token_id("<|end|>")} and found.eos_id == found.token_id("<|end|>")


def test_simple_splits(tmp_path: pathlib.Path) -> None:
    """gpt-2's pattern is that of the library, and olmo's; glm4's is Llama 3's; smollm splits digits before; llama.cpp's
    default by threes."""
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    llama3 = pre_tokenizers.Sequence([
        pre_tokenizers.Split(tokenizers.Regex(GGUF_PRE_TOKENIZER_SPLITS["llama-bpe"]), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    _, keys = byte_level(r".{1,9}")
    for pre in ("gpt-2", "olmo", "smollm", "glm4", "chatglm-bpe", "default"):
        tokenizer = HfTokenizer.load(write(tmp_path / "m.gguf", ggml__pre=pre, **keys))._backend
        for text in TEXTS:
            words = [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)]
            expected = [word for word, _ in library.pre_tokenizer.pre_tokenize_str(text)]
            assert "".join(words) == "".join(expected)
            if pre in ("gpt-2", "olmo"):
                assert words == expected
            elif pre in ("glm4", "chatglm-bpe"):
                assert words == [word for word, _ in llama3.pre_tokenize_str(text)]
            elif pre == "smollm":
                assert all(len(word) == 1 for word in words if word.isdigit() and word.isascii())
        if pre == "default":
            words = [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str("ab?! 12345,x")]
            assert words == ["ab", "?!", "Ġ", "123", "45", ",", "x"]


def test_bos(tmp_path: pathlib.Path) -> None:
    _, keys = byte_level(r"\S+|\s+")
    end = keys["ggml__eos_token_id"]
    for pre, given, expected in (
        ("llama-bpe", {}, [end]),
        ("qwen2", {}, []),
        ("llama-bpe", {"ggml__add_bos_token": False}, []),
        ("qwen2", {"ggml__add_bos_token": True}, [end]),
    ):
        found = HfTokenizer.load(write(tmp_path / "m.gguf", ggml__pre=pre, **given, **keys))
        assert found.encode("a") == [*expected, *found.encode("a", add_special_tokens=False)]


@pytest.fixture(scope="module")
def sentence_piece() -> tuple[sentencepiece.SentencePieceProcessor, dict[str, Any]]:
    """A small BPE model, and its keys as llama.cpp's converter writes them."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(line for text in CORPUS for line in text.splitlines()), model_writer=model,
        vocab_size=520, model_type="bpe", byte_fallback=True, normalization_rule_name="identity",
        remove_extra_whitespaces=False, split_digits=True, allow_whitespace_only_pieces=True,
        user_defined_symbols=["<think>"], character_coverage=0.99, minloglevel=2,
    )  # fmt: skip
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    ids = range(processor.get_piece_size())

    def kind(token_id: int) -> int:
        if processor.is_unknown(token_id):
            return 2
        if processor.is_control(token_id):
            return CONTROL
        if processor.is_byte(token_id):
            return 6
        return USER_DEFINED if processor.id_to_piece(token_id) == "<think>" else NORMAL

    return processor, {
        "ggml__model": "llama", "ggml__pre": "default", "ggml__tokens": [processor.id_to_piece(i) for i in ids],
        "ggml__scores": [processor.get_score(i) for i in ids], "ggml__token_type": [kind(i) for i in ids],
        "ggml__bos_token_id": processor.bos_id(), "ggml__eos_token_id": processor.eos_id(),
        "ggml__unknown_token_id": processor.unk_id(),
    }  # fmt: skip


def test_sentence_piece(sentence_piece: Any, tmp_path: pathlib.Path) -> None:
    processor, keys = sentence_piece
    found = HfTokenizer.load(write(tmp_path / "m.gguf", **keys))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    for text in TEXTS:
        if not text or "<think>" in text:  # sentencepiece adds no space to nothing, llama.cpp one after a special token
            continue
        ids = found.encode(text, add_special_tokens=False)
        assert ids == processor.encode(text), text
        if not text.startswith(" "):
            assert ids == theirs(text, add_special_tokens=False).input_ids, text
        assert found.encode(text) == [processor.bos_id(), *ids]
        assert found.decode(ids) == text
        pieces = found.pieces(skip_special_tokens=True)
        assert pieces is not None and b"".join(pieces[i] for i in ids).decode() == " " + text
    assert found.token_id("<think>") in found.encode("a <think> b") and found.special_ids >= {1, 2}
    bare = HfTokenizer.load(write(tmp_path / "bare.gguf", ggml__add_space_prefix=False, **keys))
    assert bare.decode(bare.encode("abc x", add_special_tokens=False)) == "abc x"
    assert bare.token_text(bare.encode("The")[1]).startswith("T")


@pytest.mark.parametrize("kind", [CONTROL, NORMAL])
def test_marks_and_spaces_of_gemma(kind: int, tmp_path: pathlib.Path) -> None:
    """No space before a text; turns are control tokens, and blanks of several spaces or lines tokens of their own,
    which the file has with spaces. kind: of the marks, which some files have as normal tokens."""
    model, marks = io.BytesIO(), ["<start_of_turn>", "<end_of_turn>"]
    blanks = ["\n\n", "\n\n\n", "\u2581\u2581", "\u2581\u2581\u2581", "\u2581\u2581\u2581\u2581", "\t", "<table>"]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(line for text in CORPUS for line in text.splitlines()), model_writer=model,
        vocab_size=520, model_type="bpe", byte_fallback=True, normalization_rule_name="identity",
        remove_extra_whitespaces=False, split_digits=True, allow_whitespace_only_pieces=True, add_dummy_prefix=False,
        user_defined_symbols=[*marks, *blanks], character_coverage=0.99, minloglevel=2, pad_id=0, eos_id=1, bos_id=2,
        unk_id=3, pad_piece="<pad>", eos_piece="<eos>", bos_piece="<bos>",
    )  # fmt: skip
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    ids = range(processor.get_piece_size())
    types = {"<unk>": 2, **dict.fromkeys(("<pad>", "<bos>", "<eos>"), CONTROL), **dict.fromkeys(marks, kind)}
    types |= dict.fromkeys(blanks, USER_DEFINED)
    pieces = [processor.id_to_piece(i) for i in ids]
    path = write(
        tmp_path / "m.gguf", "gemma3", ggml__model="llama", ggml__pre="default", ggml__add_space_prefix=False,
        ggml__tokens=[one.replace("\u2581", " ") if one in blanks else one for one in pieces],
        ggml__scores=[processor.get_score(i) for i in ids], ggml__bos_token_id=2, ggml__eos_token_id=1,
        ggml__token_type=[6 if processor.is_byte(i) else types.get(pieces[i], NORMAL) for i in ids],
        ggml__unknown_token_id=3, ggml__add_bos_token=True, ggml__add_eos_token=False,
    )  # fmt: skip
    found = HfTokenizer.load(path)
    texts = [
        *TEXTS, "a\n\nb\n\n\nc\n\n\n\n\nd", "x   y     z      ", "    return", "\t\tx <table>\n",
        "<start_of_turn>user\nHello  there<end_of_turn>\n<start_of_turn>model\n",
    ]  # fmt: skip
    for text in texts:
        ids_of_text = found.encode(text)
        assert ids_of_text == [processor.bos_id(), *processor.encode(text)], text
        assert found.decode(ids_of_text[1:], skip_special_tokens=False) == text
    assert found.special_ids >= {found.token_id(one) for one in ("<bos>", "<eos>", *marks)}


def test_marks_of_phi3_take_the_line_behind_them(sentence_piece: Any, tmp_path: pathlib.Path) -> None:
    """As its own tokenizer's added tokens do, except three; others with a file like it do not."""
    processor, keys = sentence_piece
    marks = ["<|endoftext|>", "<|assistant|>", "<|user|>", "<|end|>"]
    more = {"ggml__tokens": marks, "ggml__scores": [-1000.0] * 4, "ggml__token_type": [CONTROL] * 4}
    keys = {**keys, **{key: keys[key] + value for key, value in more.items()}}
    found, other = (HfTokenizer.load(write(tmp_path / f"{one}.gguf", one, **keys)) for one in ("phi3", "llama"))
    user, end, assistant = (found.token_id(one) for one in ("<|user|>", "<|end|>", "<|assistant|>"))
    text = "<|user|>\nThe lazy dog <|end|>\n<|assistant|>\n  quick"
    the, dog = processor.encode("The lazy dog "), processor.encode("quick")
    assert found.encode(text, add_special_tokens=False) == [user, *the, end, assistant, *dog]
    assert other.encode(text, add_special_tokens=False) != found.encode(text, add_special_tokens=False)
    text = "<|endoftext|>\nquick"
    assert found.encode(text) == other.encode(text) and found.encode(text)[-len(dog) :] != dog
    template = "{% for m in messages %}<|user|>\n{{ m.content }}<|end|>\n{% endfor %}<|assistant|>\n"
    path = write(tmp_path / "chat.gguf", "phi3", chat_template=template, **keys)
    found, chat = HfTokenizer.load(path), ChatTemplate.load(path)
    assert chat is not None
    found.learn_marks(chat.sources.values())
    rendered = chat.render([{"role": "user", "content": "The lazy dog "}])
    assert found.encode(rendered, add_special_tokens=False) == [user, *the, end, assistant]


def test_scores_decide_and_not_ids(sentence_piece: Any, tmp_path: pathlib.Path) -> None:
    processor, keys = sentence_piece
    order = list(range(3, processor.get_piece_size()))
    random.Random(0).shuffle(order)
    order = [0, 1, 2, *order]
    shuffled = {key: [keys[key][i] for i in order] for key in ("ggml__tokens", "ggml__scores", "ggml__token_type")}
    found = HfTokenizer.load(write(tmp_path / "m.gguf", **{**keys, **shuffled}))
    for text in CORPUS[:4]:
        assert [order[i] for i in found.encode(text, add_special_tokens=False)] == processor.encode(text)


def test_chat_template(tmp_path: pathlib.Path) -> None:
    _, keys = byte_level(r"\S+|\s+")
    template = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    path = write(tmp_path / "m.gguf", ggml__pre="qwen2", chat_template=template, **keys)
    messages = [{"role": "user", "content": "hi"}]
    chat = ChatTemplate.load(path)
    assert chat is not None and chat.render(messages) == "<|end|>[user]hi"
    path = write(tmp_path / "n.gguf", ggml__pre="qwen2", chat_template=template, chat_template__tool_use="T", **keys)
    chat = ChatTemplate.load(path)
    assert chat is not None and chat.render(messages, tools=[{"type": "function"}]) == "T"
    assert ChatTemplate.load(write(tmp_path / "o.gguf", ggml__pre="qwen2", **keys)) is None
    other = tmp_path / "other.jinja"
    other.write_text("other")
    chat = ChatTemplate.load(path, other)
    assert chat is not None and chat.render(messages) == "other"


def test_control_tokens_of_a_request_are_its_characters(sentence_piece: Any, tmp_path: pathlib.Path) -> None:
    """Control tokens have a place in a GGUF vocabulary; sentencepiece too never finds them in a text."""
    processor, keys = sentence_piece
    found = HfTokenizer.load(write(tmp_path / "m.gguf", **keys))
    for text in ("</s>", "hi</s> the<s>", "<unk> brown </s></s>", "日 </s>"):
        assert found.encode(text, add_special_tokens=False) != processor.encode(text)
        assert found.encode(TracedText(text, Origin.REQUEST), add_special_tokens=False) == processor.encode(text)
    backend, keys = byte_level(GGUF_PRE_TOKENIZER_SPLITS["llama-bpe"])
    template = "{% for m in messages %}<|end|>{{ m.content }}<think>{% endfor %}"
    path = write(tmp_path / "b.gguf", ggml__pre="llama-bpe", chat_template=template, **keys)
    found, chat = HfTokenizer.load(path), ChatTemplate.load(path)
    assert chat is not None
    found.learn_marks(chat.sources.values())
    without = tokenizers.Tokenizer(backend.model)
    without.pre_tokenizer = backend.pre_tokenizer
    for text in ("x<|end|>hello<|end|> <think> y</think>", "<|end|>", " <think>"):
        ids = found.encode(chat.render([{"role": "user", "content": text}]), add_special_tokens=False)
        assert ids == [found.eos_id, *without.encode(text).ids, found.token_id("<think>")]


SMALL: dict[str, Any] = {
    "ggml__model": "gpt2", "ggml__pre": "qwen2", "ggml__tokens": ["a", "b", "ab", "<s>"],
    "ggml__token_type": [1, 1, 1, 3], "ggml__merges": ["a b"],
}  # fmt: skip
SPM = {**SMALL, "ggml__model": "llama", "ggml__scores": [0.0, -1.0, -2.0, 0.0]}


@pytest.mark.parametrize(
    ("keys", "parts"),
    [
        ({**SMALL, "ggml__model": "bert"}, ("tokenizer.ggml.model = 'bert'", "gpt2, llama", "--tokenizer")),
        ({**SMALL, "ggml__pre": "viking"}, ("tokenizer.ggml.pre = 'viking'", "llama-bpe", "qwen2", "default")),
        ({**SMALL, "ggml__tokens": ["a", "b", "ab", "a"]}, ("tokenizer.ggml.tokens repeats 'a'",)),
        ({**SMALL, "ggml__tokens": ["a", "b", "ab", "x" * 2000]}, ("2,000 characters; the limit is 1,024",)),
        ({**SMALL, "ggml__merges": ["a c"]}, ("tokenizer.ggml.merges has 'a c'",)),
        ({**SMALL, "ggml__merges": ["ab"]}, ("tokenizer.ggml.merges has 'ab'",)),
        ({**SMALL, "ggml__merges": ["a b b"]}, ("tokenizer.ggml.merges has 'a b b'",)),
        ({**SMALL, "ggml__token_type": [1, 1]}, ("tokenizer.ggml.token_type must be 4 integers",)),
        ({**SMALL, "ggml__token_type": [1.0] * 4}, ("tokenizer.ggml.token_type must be 4 integers",)),
        ({**SMALL, "ggml__bos_token_id": 4}, ("tokenizer.ggml.bos_token_id = 4 must be below 4",)),
        ({**SMALL, "ggml__add_bos_token": 1}, ("tokenizer.ggml.add_bos_token = 1 must be a bool",)),
        ({**SMALL, "ggml__tokens": ["a", "b", "ab", "$A <"], "ggml__bos_token_id": 3, "ggml__add_bos_token": True},
         ("add_bos_token is set",)),
        ({**SMALL, "chat_template": ["x"]}, ("tokenizer.chat_template must be a string",)),
        ({**SPM, "ggml__scores": [0.0, float("nan"), 1.0, 1.0]}, ("tokenizer.ggml.scores must be 4 finite floats",)),
        ({**SPM, "ggml__scores": [0.0]}, ("tokenizer.ggml.scores must be 4 finite floats",)),
        ({**SPM, "ggml__add_space_prefix": "x"}, ("tokenizer.ggml.add_space_prefix = 'x' must be a bool",)),
    ],
)  # fmt: skip
def test_refused(keys: dict[str, Any], parts: tuple[str, ...], tmp_path: pathlib.Path) -> None:
    with pytest.raises(LoadError) as caught:
        HfTokenizer.load(write(tmp_path / "m.gguf", **keys))
    for part in parts:
        assert part in caught.value.message, caught.value.message


@pytest.mark.parametrize("key", ["ggml__tokens", "ggml__merges"])
def test_missing(key: str, tmp_path: pathlib.Path) -> None:
    keys = {name: value for name, value in SMALL.items() if name != key}
    with pytest.raises(LoadError, match=key.replace("__", r"\.")):
        HfTokenizer.load(write(tmp_path / "m.gguf", **keys))
