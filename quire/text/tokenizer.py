"""Text to token ids and back. Owns loading a checkpoint's tokenizer and the bytes of each token.

Does not own incremental text (`text/detokenizer`) nor chat templates (`text/chat_template`).
Invariant: a tokenizer that was loaded encodes any valid text in time linear in its length, or refuses it.
"""

from __future__ import annotations

import functools
import json
import pathlib
import re
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, Protocol

import msgspec
import tokenizers
from tokenizers import processors

from quire.config.gguf import is_gguf, read_header
from quire.core.errors import ConfigError, ContextLengthExceeded, InvalidParameter, LoadError
from quire.core.files import read_regular
from quire.text.gguf_tokenizer import build_tokenizer, tokenizer_config
from quire.text.length import too_many_tokens
from quire.text.marks import Marks
from quire.text.origin import TracedText, plain

PROBES: Final = ("a" * 4000 + "!", " " * 4000 + "x", "1" * 4000, "\n" * 4000, "é́" * 1000, "😀‍" * 1000, "a-" * 2000)
MAX_PROBE_S: Final = 2.0
"""Longest time for all of `PROBES`; a pre-tokenizer whose regular expression backtracks takes longer."""
MAX_FILE_BYTES: Final = 1 << 30
"""Of tokenizer.json and of each file beside it."""
SPECIAL_NAMES: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer(Protocol):
    """What the engine needs of a tokenizer."""

    bos_id: int | None
    eos_id: int | None
    special_ids: frozenset[int]
    """Control tokens, left out of text by `skip_special_tokens`."""

    def __len__(self) -> int:
        """One more than the largest token id."""
        ...

    def encode(self, text: str, add_special_tokens: bool = True, most: int | None = None) -> list[int]:
        """Token ids of `text`; InvalidParameter if it is not valid Unicode, ContextLengthExceeded if they are more than
        `most`. Special tokens written out in it become special tokens, but of a `TracedText` only those that its
        template wrote."""
        ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of a whole sequence; ids without a string count as empty."""
        ...

    def pieces(self, skip_special_tokens: bool) -> Mapping[int, bytes] | None:
        """Token id → the bytes that it adds to a text, if this does not depend on its neighbours."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one token, special or not; empty for an id without a string."""
        ...

    def token_text(self, token_id: int) -> str:
        """One token as text, incomplete characters as U+FFFD."""
        ...


class _AddedToken(msgspec.Struct):
    id: int
    content: str
    special: bool = False


class _TokenizerFile(msgspec.Struct):
    """The parts of tokenizer.json that are read here; the library reads the rest."""

    model: dict[str, msgspec.Raw]
    added_tokens: list[_AddedToken] | None = None
    decoder: dict[str, Any] | None = None


class _Pieces(dict[int, bytes]):
    """Fills itself on first use of an id; bounded by the vocabulary."""

    def __init__(self, tokenizer: HfTokenizer, skipped: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped

    def __missing__(self, token_id: int) -> bytes:
        piece = b"" if token_id in self._skipped else self._tokenizer.token_bytes(token_id)
        if 0 <= token_id < len(self._tokenizer):
            self[token_id] = piece
        return piece


class HfTokenizer:
    """`Tokenizer` over the `tokenizers` library and a folder in the Hugging Face layout."""

    def __init__(self, backend: tokenizers.Tokenizer, decoder: dict[str, Any] | None, config: dict[str, Any]) -> None:
        self._backend = backend
        self._style = _Style(decoder)
        backend.no_truncation()
        backend.no_padding()
        added = backend.get_added_tokens_decoder()
        self._len = max([backend.get_vocab_size() - 1, *added]) + 1
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.special_tokens = special_strings(config)
        self.bos_id = self._named_id("bos_token")
        self.eos_id = self._named_id("eos_token")
        _set_bos_and_eos(self, config)
        self._shown = _Pieces(self, frozenset())
        self._skipping = _Pieces(self, self.special_ids)
        self._marks: Marks | None = None

    @classmethod
    def load(cls, folder: pathlib.Path, n_embeddings: int | None = None) -> HfTokenizer:
        """Read tokenizer.json and tokenizer_config.json, or the metadata of a GGUF file.

        Raises ConfigError if there is none, if its ids exceed `n_embeddings`, or if it is too slow on some text, and
        LoadError if a file is damaged.
        """
        if is_gguf(folder):
            tokenizer = cls(*build_tokenizer(read_header(folder)))
        else:
            backend, parts = _read_tokenizer(folder)
            tokenizer = cls(backend, parts.decoder, read_tokenizer_config(folder))
        if n_embeddings is not None:
            tokenizer.check_fits(n_embeddings)
        _probe(tokenizer)
        return tokenizer

    def check_fits(self, n_embeddings: int) -> None:
        """ConfigError if a token id has no row in the model's embedding."""
        if len(self) > n_embeddings:
            raise ConfigError(
                f"the tokenizer has ids up to {len(self) - 1}, but the model embeds only {n_embeddings} tokens: "
                "this tokenizer belongs to another checkpoint; pass the right one with --tokenizer"
            )

    def __len__(self) -> int:
        return self._len

    def encode(self, text: str, add_special_tokens: bool = True, most: int | None = None) -> list[int]:
        """See `Tokenizer.encode`."""
        if isinstance(text, TracedText):
            return self._encode_traced(text, add_special_tokens, most)
        return _encode(self._backend, text, add_special_tokens, most)

    def learn_marks(self, sources: Collection[str]) -> None:
        """Take note of which tokens the chat templates in `sources` use as marks (see `text/marks`)."""
        self._marks = Marks(self._backend, sources)

    def _encode_traced(self, text: TracedText, add_special_tokens: bool, most: int | None) -> list[int]:
        if self._marks is None:
            self.learn_marks(())
            assert self._marks is not None
        token_ids = untrusted = _encode(self._backend, plain(text), False, most)
        if not self._marks.are_trusted(text, untrusted):
            token_ids = self._marks.restored(_encode(self._marks.backend, self._marks.renamed(text), False, most))
        if not add_special_tokens:
            return token_ids
        whole = _encode(self._backend, plain(text), add_special_tokens=True)
        n_before = next(i for i in range(len(whole) + 1) if whole[i : i + len(untrusted)] == untrusted)
        return [*whole[:n_before], *token_ids, *whole[n_before + len(untrusted) :]]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """See `Tokenizer.decode`."""
        return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def pieces(self, skip_special_tokens: bool) -> Mapping[int, bytes] | None:
        """See `Tokenizer.pieces`; None for decoders that look at neighbours (WordPiece and the like)."""
        if not self._style.context_free:
            return None
        return self._skipping if skip_special_tokens else self._shown

    def token_bytes(self, token_id: int) -> bytes:
        """See `Tokenizer.token_bytes`."""
        token = self._backend.id_to_token(token_id) if 0 <= token_id < 2**32 else None
        return b"" if token is None else self._style.token_bytes(token)

    def token_text(self, token_id: int) -> str:
        """See `Tokenizer.token_text`."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_id(self, token: str) -> int | None:
        """Id of the token with exactly this string in the vocabulary."""
        return self._backend.token_to_id(token)

    def _named_id(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self._backend.token_to_id(text)

    def set_post_processor(self, template: str, special: list[tuple[str, int]]) -> None:
        """What `add_special_tokens` adds around a text ('$A')."""
        self._backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)


def _encode(backend: tokenizers.Tokenizer, text: str, add_special_tokens: bool, most: int | None = None) -> list[int]:
    try:
        batch = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    except TypeError:
        raise InvalidParameter("prompt", text, "valid Unicode text (it has unpaired surrogates)") from None
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # the library's regular-expression engine gave up
            raise
        raise InvalidParameter("prompt", text, "text that this model's tokenizer can split") from None
    found = batch[0]
    if most is not None and len(found) > most:  # before the list is made, which keeps the interpreter
        raise ContextLengthExceeded(too_many_tokens(len(found), most), param="prompt")
    return found.ids


class _Style:
    """How a decoder turns one token's string into bytes."""

    def __init__(self, decoder: dict[str, Any] | None) -> None:
        parts = [decoder] if decoder else []
        if decoder and decoder.get("type") == "Sequence":
            parts = decoder.get("decoders", [])
        kinds = [part.get("type") for part in parts]
        self._byte_level = kinds == ["ByteLevel"]
        self._byte_fallback = "ByteFallback" in kinds
        self._replaced = [pair for part in parts if (pair := _replacement(part)) is not None]
        fused = kinds.index("Fuse") if "Fuse" in kinds else len(kinds)
        per_token = all(
            kind in {"ByteFallback", "Metaspace"} or _replacement(part) is not None
            for kind, part in zip(kinds[:fused], parts[:fused], strict=True)
        )
        whole = all(part.get("type") in {"Fuse", "Strip"} and not part.get("stop") for part in parts[fused:])
        self.context_free = self._byte_level or (bool(parts) and per_token and whole)
        """A token adds the same bytes wherever it stands (the space that Strip removes at the very start is kept:
        generated text continues a prompt)."""

    def token_bytes(self, token: str) -> bytes:
        if self._byte_level:
            try:
                return bytes([_byte_level_alphabet()[char] for char in token])
            except KeyError:
                return token.encode()
        match = _BYTE_TOKEN.fullmatch(token) if self._byte_fallback else None
        if match is not None:
            return bytes([int(match.group(1), 16)])
        for old, new in self._replaced:
            token = token.replace(old, new)
        return token.encode()


def _replacement(part: dict[str, Any]) -> tuple[str, str] | None:
    """(old, new) of a decoder part that replaces text inside one token."""
    if part.get("type") == "Metaspace":
        return str(part.get("replacement", "▁")), " "
    pattern = part.get("pattern")
    if part.get("type") == "Replace" and isinstance(pattern, dict) and "String" in pattern:
        return str(pattern["String"]), str(part.get("content", ""))
    return None


@functools.cache
def _byte_level_alphabet() -> dict[str, int]:
    """Character → byte of byte-level BPE (Radford et al. 2019): printable bytes as they are, others from U+0100."""
    kept = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in kept]
    return {chr(byte): byte for byte in kept} | {chr(256 + i): byte for i, byte in enumerate(others)}


def read_tokenizer_config(folder: pathlib.Path) -> dict[str, Any]:
    """tokenizer_config.json completed by special_tokens_map.json; empty if there is none. LoadError if damaged.

    For a GGUF file: what its metadata says of the same.
    """
    if is_gguf(folder):
        return tokenizer_config(read_header(folder))
    config: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        path = folder / name
        if not path.exists():
            continue
        try:
            read = json.loads(_content(path))
        except (ValueError, RecursionError) as error:
            raise LoadError(f"{name} is damaged: {error}; download the checkpoint again") from None
        if not isinstance(read, dict):
            raise LoadError(f"{name} holds {type(read).__name__}, not an object; download the checkpoint again")
        config.update({key: value for key, value in read.items() if value is not None})
    return config


def special_strings(config: Mapping[str, Any]) -> dict[str, str]:
    """'bos_token' and the like → its string; the config holds strings or AddedToken objects."""
    found = {}
    for name in SPECIAL_NAMES:
        token = config.get(name)
        content = token.get("content") if isinstance(token, dict) else token
        if isinstance(content, str):
            found[name] = content
    return found


def _read_tokenizer(folder: pathlib.Path) -> tuple[tokenizers.Tokenizer, _TokenizerFile]:
    path = folder / "tokenizer.json"
    if not path.exists():
        others = ("tokenizer.model", "spiece.model", "tekken.json", "vocab.json")
        found = [name for name in others if (folder / name).exists()]
        there = f"only {', '.join(found)}" if found else "no tokenizer file"
        raise ConfigError(
            f"tokenizer.json is missing ({there} in the folder). Convert the tokenizer once with "
            "transformers.AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER), pass another folder with "
            "--tokenizer, or serve token ids only with --skip-tokenizer-init"
        )
    content = _content(path)
    try:
        parts = msgspec.json.decode(content, type=_TokenizerFile)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise LoadError(f"tokenizer.json is damaged: {error}; download the checkpoint again") from None
    _check_added_tokens(parts.added_tokens or [])
    try:
        return tokenizers.Tokenizer.from_buffer(content), parts
    except Exception as error:  # the library raises no narrower class
        raise LoadError(f"tokenizer.json cannot be read: {error}; download the checkpoint again") from None


def _content(path: pathlib.Path) -> bytes:
    try:
        return read_regular(path, MAX_FILE_BYTES)
    except OSError as error:
        raise LoadError(f"cannot read {path}: {error.strerror}") from None


def _check_added_tokens(added: list[_AddedToken]) -> None:
    by_id: dict[int, str] = {}
    by_content: dict[str, int] = {}
    for token in added:
        if by_id.setdefault(token.id, token.content) != token.content:
            pair = f"{by_id[token.id]!r} and {token.content!r}"
            raise LoadError(f"tokenizer.json gives id {token.id} to two added tokens: {pair}")
        if by_content.setdefault(token.content, token.id) != token.id:
            pair = f"{by_content[token.content]} and {token.id}"
            raise LoadError(f"tokenizer.json gives the added token {token.content!r} two ids: {pair}")


def _set_bos_and_eos(tokenizer: HfTokenizer, config: dict[str, Any]) -> None:
    """`add_bos_token` and `add_eos_token` of the config replace tokenizer.json's post-processor, as in transformers."""
    if "add_bos_token" not in config and "add_eos_token" not in config:
        return
    bos, eos = tokenizer.special_tokens.get("bos_token"), tokenizer.special_tokens.get("eos_token")
    parts, special = ["$A"], []
    if config.get("add_bos_token") and bos is not None and tokenizer.bos_id is not None:
        parts.insert(0, bos)
        special.append((bos, tokenizer.bos_id))
    if config.get("add_eos_token") and eos is not None and tokenizer.eos_id is not None:
        parts.append(eos)
        special.append((eos, tokenizer.eos_id))
    tokenizer.set_post_processor(" ".join(parts), list(dict.fromkeys(special)))


def _probe(tokenizer: HfTokenizer) -> None:
    started_s = time.monotonic()
    for probe in PROBES:
        try:
            tokenizer.encode(probe)
        except InvalidParameter:
            shape = f"{len(probe)} characters like {probe[:4]!r}"
            raise ConfigError(f"the tokenizer cannot split {shape}: its pattern backtracks") from None
        taken_s = time.monotonic() - started_s
        if taken_s > MAX_PROBE_S:
            raise ConfigError(
                f"the tokenizer took {taken_s:.1f} s for {len(probe)} characters of {probe[:4]!r}, more than "
                f"{MAX_PROBE_S} s: its pattern backtracks, and one request could block the server"
            )
