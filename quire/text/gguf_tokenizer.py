"""A tokenizer from the metadata of a GGUF file: byte-level BPE ('gpt2') and SentencePiece BPE ('llama').

Owns the keys tokenizer.*; does not own the file's layout (`config/gguf`) nor what a tokenizer does (`text/tokenizer`).
Behaves as llama.cpp's vocabularies do (llama-vocab.cpp), except that qwen2 normalises text to NFC as its own does.
Invariant: any metadata gives a tokenizer or a LoadError, in bounded time.
"""

from __future__ import annotations

import logging
from typing import Any, Final

import numpy as np
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from quire.config.arch import MAX_VOCAB
from quire.config.gguf import Header
from quire.config.gguf_model import GEMMA_MARKS
from quire.core.errors import LoadError, shown

MAX_ADDED: Final = 1 << 16
MAX_TOKEN_CHARS: Final = 1024
MAX_SPLIT_CHARS: Final = 8_000_000
"""Longest SentencePiece vocabulary; deriving its merges tries every split of every token."""
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Token types."""
SPECIAL_IDS: Final = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}

_logger = logging.getLogger(__name__)

_ENDINGS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL: Final = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3: Final = _ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _TAIL
_QWEN2: Final = _ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _TAIL
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN: Final = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _TAIL
)
_GPT4O: Final = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDINGS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDINGS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _TAIL
)
_DEFAULT: Final = (
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    r"[0-9][0-9][0-9]",
)
_SPLITS: Final[dict[str, tuple[str, ...]]] = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "smaug-bpe", "dbrx"), (_LLAMA3,)),
    **dict.fromkeys(("glm4", "chatglm-bpe"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), (_QWEN2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r"), (r"\p{N}", _GPT2)),
    **dict.fromkeys(("gpt-2", "phi-2", "olmo"), (_GPT2,)),
    "tekken": (_TEKKEN,),
    "gpt-4o": (_GPT4O,),
    "default": _DEFAULT,
}
"""tokenizer.ggml.pre → expressions by which a text is split, one after another."""
_WHOLE_WORDS: Final = frozenset(("llama-bpe", "llama3", "llama-v3", "falcon3", "tekken"))
"""A word that is in the vocabulary is one token, whatever the merges make of it; these also begin with bos."""
_PHI3_BARE: Final = frozenset(("<unk>", "<s>", "<|endoftext|>"))
"""Those of Phi-3's added tokens that leave what follows them."""

Built = tuple[tokenizers.Tokenizer, dict[str, Any], dict[str, Any]]


def build_tokenizer(header: Header) -> Built:
    """(tokenizer, its decoder and its settings as tokenizer.json and tokenizer_config.json have them).

    Raises LoadError naming the key at fault, or what is supported.
    """
    kind = header.values.get("tokenizer.ggml.model")
    if kind not in _BUILDERS:
        raise LoadError(
            f"{header.path}: tokenizer.ggml.model = {shown(kind)} is not supported; supported are"
            f" {', '.join(_BUILDERS)}. Pass a folder with tokenizer.json by --tokenizer"
        )
    tokens = _tokens(header)
    types = [CONTROL if token in GEMMA_MARKS else one for token, one in zip(tokens, _types(header), strict=True)]
    backend, decoder = _BUILDERS[kind](header, tokens, types)
    _add_tokens(header, backend, tokens, types)
    return backend, decoder, tokenizer_config(header)


def tokenizer_config(header: Header) -> dict[str, Any]:
    """The file's settings under the names of tokenizer_config.json, chat templates included. Raises LoadError."""
    values, tokens = header.values, header.strings("tokenizer.ggml.tokens")
    config: dict[str, Any] = {}
    for name, key in SPECIAL_IDS.items():
        token_id = values.get(f"tokenizer.ggml.{key}")
        if token_id is None or token_id == 2**32 - 1:  # the file's way to say that there is none
            continue
        if type(token_id) is not int or not 0 <= token_id < len(tokens):
            raise LoadError(f"{header.path}: tokenizer.ggml.{key} = {shown(token_id)} must be below {len(tokens):,}")
        config[name] = tokens[token_id] or _unnamed(token_id)
    adds_bos = values.get("tokenizer.ggml.model") == "llama" or values.get("tokenizer.ggml.pre") in _WHOLE_WORDS
    for name, default in (("add_bos_token", adds_bos), ("add_eos_token", False)):
        config[name] = _flag(header, name, default)
        token = config.get(name[4:])
        if config[name] and token is not None and (not token or any(char.isspace() or char in ":$" for char in token)):
            raise LoadError(f"{header.path}: {name} is set, but the token is {shown(token)}; it must be one plain word")
    templates = _templates(header)
    if templates:
        config["chat_template"] = templates
    return config


def _flag(header: Header, name: str, default: bool) -> bool:
    value = header.values.get(f"tokenizer.ggml.{name}", default)
    if not isinstance(value, bool):
        raise LoadError(f"{header.path}: tokenizer.ggml.{name} = {shown(value)} must be a bool")
    return value


def _templates(header: Header) -> list[dict[str, str]]:
    found = []
    for key, value in header.values.items():
        if key == "tokenizer.chat_template" or key.startswith("tokenizer.chat_template."):
            if not isinstance(value, str):
                raise LoadError(f"{header.path}: {key} must be a string")
            name = key.removeprefix("tokenizer.chat_template").lstrip(".") or "default"
            found.append({"name": name, "template": value})
    return found


def _tokens(header: Header) -> list[str]:
    """The vocabulary, checked; every token has a name."""
    tokens = header.strings("tokenizer.ggml.tokens")
    if not 1 <= len(tokens) <= MAX_VOCAB:
        raise LoadError(f"{header.path}: tokenizer.ggml.tokens has {len(tokens):,} items, not 1 to {MAX_VOCAB:,}")
    tokens = [token or _unnamed(token_id) for token_id, token in enumerate(tokens)]
    seen: set[str] = set()
    for token in tokens:
        if token in seen:
            raise LoadError(f"{header.path}: tokenizer.ggml.tokens repeats {shown(token)}")
        if len(token) > MAX_TOKEN_CHARS:
            raise LoadError(
                f"{header.path}: a token of tokenizer.ggml.tokens has {len(token):,} characters; the limit is"
                f" {MAX_TOKEN_CHARS:,}"
            )
        seen.add(token)
    return tokens


def _unnamed(token_id: int) -> str:
    """What an empty string in the vocabulary is called, as in llama.cpp."""
    return f"[EMPTY_{token_id}]"


def _types(header: Header) -> list[int]:
    """One a token; all normal where the file says nothing."""
    n_tokens = header.values["tokenizer.ggml.tokens"].n_items
    types = header.numbers("tokenizer.ggml.token_type")
    if not len(types):
        return [NORMAL] * n_tokens
    if len(types) != n_tokens or types.dtype.kind not in "iu":
        raise LoadError(f"{header.path}: tokenizer.ggml.token_type must be {n_tokens:,} integers, one for each token")
    return [int(kind) for kind in types]


def _byte_level(header: Header, tokens: list[str], types: list[int]) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    pre = header.values.get("tokenizer.ggml.pre", "default")
    if not isinstance(pre, str) or pre not in _SPLITS:
        raise LoadError(
            f"{header.path}: tokenizer.ggml.pre = {shown(pre)} is not supported; supported are {', '.join(_SPLITS)}."
            " Pass a folder with tokenizer.json by --tokenizer"
        )
    if "tokenizer.ggml.pre" not in header.values:
        _logger.warning("%s: tokenizer.ggml.pre is missing; text is split as llama.cpp does by default", header.path)
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    merges = _merges(header, vocab)
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, ignore_merges=pre in _WHOLE_WORDS))
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(tokenizers.Regex(regex), behavior="isolated") for regex in _SPLITS[pre]]
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, level])
    backend.decoder = decoders.ByteLevel()
    return backend, {"type": "ByteLevel"}


def _merges(header: Header, vocab: dict[str, int]) -> list[tuple[str, str]]:
    merges = []
    for merge in header.strings("tokenizer.ggml.merges"):
        left, _, right = merge.partition(" ")
        if left not in vocab or right not in vocab or left + right not in vocab:
            raise LoadError(
                f"{header.path}: tokenizer.ggml.merges has {shown(merge)}; both parts and the whole must be tokens"
            )
        merges.append((left, right))
    if not merges:
        raise LoadError(f"{header.path}: tokenizer.ggml.merges is missing; a byte-level vocabulary needs it")
    return merges


def _sentence_piece(header: Header, tokens: list[str], types: list[int]) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """Pairs are merged by the score of what they make, and characters without a token become bytes."""
    scores = header.numbers("tokenizer.ggml.scores")
    if len(scores) != len(tokens) or scores.dtype.kind != "f" or not np.isfinite(scores).all():
        raise LoadError(f"{header.path}: tokenizer.ggml.scores must be {len(tokens):,} finite floats, one a token")
    unknown = tokenizer_config(header).get("unk_token")
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab,
            _merges_by_score(header, tokens, types, scores),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=BYTE in types,
        )
    )
    spaces = [normalizers.Replace(" ", "▁")]
    parts: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if _flag(header, "add_space_prefix", True):
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), *spaces])
        steps.append(decoders.Strip(" ", 1, 0))
        parts.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    else:
        backend.normalizer = normalizers.Sequence(spaces)
    backend.decoder = decoders.Sequence(steps)
    return backend, {"type": "Sequence", "decoders": parts}


def _merges_by_score(
    header: Header, tokens: list[str], types: list[int], scores: np.ndarray[Any, Any]
) -> list[tuple[str, str]]:
    """Every split of a token into two tokens, best token first: SentencePiece's order written as merges."""
    n_chars = sum(map(len, tokens))
    if n_chars > MAX_SPLIT_CHARS:
        raise LoadError(
            f"{header.path}: tokenizer.ggml.tokens has {n_chars:,} characters in all; the limit is {MAX_SPLIT_CHARS:,}"
        )
    usable = {token for token, kind in zip(tokens, types, strict=True) if kind in (NORMAL, USER_DEFINED)}
    order = sorted(range(len(tokens)), key=lambda token_id: -scores[token_id])
    return [
        (token[:cut], token[cut:])
        for token in (tokens[token_id] for token_id in order)
        if token in usable
        for cut in range(1, len(token))
        if token[:cut] in usable and token[cut:] in usable
    ]


def _add_tokens(header: Header, backend: tokenizers.Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Control and unknown tokens are special; user-defined ones are found whole in a text too, but are shown. Those of
    Phi-3 take the spaces and lines behind them, which no key says."""
    values = header.values
    is_phi3 = values.get("general.architecture") == "phi3" and values.get("tokenizer.ggml.model") == "llama"
    special = [token for token, kind in zip(tokens, types, strict=True) if kind in (CONTROL, UNKNOWN)]
    plain = [token for token, kind in zip(tokens, types, strict=True) if kind == USER_DEFINED]
    n_added = len(special) + len(plain)
    if n_added > MAX_ADDED:
        raise LoadError(f"{header.path}: {n_added:,} tokens are control or user-defined; the limit is {MAX_ADDED:,}")

    def added(token: str, is_special: bool) -> AddedToken:
        strips = is_phi3 and token not in _PHI3_BARE
        return AddedToken(token, normalized=False, special=is_special, rstrip=strips)

    backend.add_special_tokens([added(token, True) for token in special])
    backend.add_tokens([added(token, False) for token in plain])


_BUILDERS: Final = {"gpt2": _byte_level, "llama": _sentence_piece}
"""tokenizer.ggml.model → how its tokenizer is made."""
