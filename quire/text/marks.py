"""The marks of a tokenizer, and encoding that takes them from a template alone.

Added tokens are found anywhere in a text, so a message that spells `<|im_start|>` would get the token. Marks are the
added tokens that steer a model. What a request says about them is encoded as if they did not exist, which is how those
characters were written before the token was added. Owns which tokens are marks, and that encoding. Does not own where
a character comes from (`text/origin`). Invariants: a text whose marks are all trusted keeps the tokenizer's own ids; no
mark comes out of characters of a request, however the template put them together or the tokenizer normalises them.
"""

from __future__ import annotations

import json
import re
import secrets
import unicodedata
from collections.abc import Collection
from typing import Any, Final

import tokenizers
from tokenizers import AddedToken, models

from quire.core.errors import InvalidParameter
from quire.text.origin import Origin, TracedText, origins_of, plain

_OF_TEMPLATE: Final = bytes((Origin.TEMPLATE,))
_NOT_OF_REQUEST = re.compile(rb"[^\x04]+")
_UNNORMALISED: Final = "A ＜ﬁ>\u0338e\u0301"
"""Changed by every normalizer that does anything."""
_SHAPES: Final = (("<|", "|>"), ("<｜", "｜>"))
"""How control tokens look even where no flag says so: DeepSeek's `<｜User｜>` is not special."""


def is_control(token: AddedToken) -> bool:
    """A token that only a template may write. White space and single visible characters are vocabulary, as flagged as
    they may be (some checkpoints pad with '!')."""
    text = token.content
    if not text.strip() or (len(text) == 1 and text.isprintable()):
        return False
    return token.special or any(text.startswith(begin) and text.endswith(end) for begin, end in _SHAPES)


def is_soft_mark(token: AddedToken, sources: Collection[str]) -> bool:
    """A token that also the model may have written in its earlier turns: one of words and signs that the chat template
    writes, as `<think>` and `<tool_call>`. Gemma's `<h1>`, which no template writes, is vocabulary."""
    text = token.content
    is_tag = any(char.isalnum() for char in text) and any(not char.isalnum() and not char.isspace() for char in text)
    return is_tag and not is_control(token) and any(text in source for source in sources)


class Marks:
    """Those of one tokenizer. Constant; any threads may use it.

    `backend` is a second tokenizer on the same model, in which the marks have private names instead of their texts:
    trusted ones are renamed before encoding, all others are ordinary text to it.
    """

    def __init__(self, backend: tokenizers.Tokenizer, sources: Collection[str] = ()) -> None:
        """sources: of the chat templates, see `is_soft_mark`."""
        added = backend.get_added_tokens_decoder()
        controls = {token.content: number for number, token in added.items() if is_control(token)}
        soft = {token.content: number for number, token in added.items() if is_soft_mark(token, sources)}
        self._by_text = controls | soft
        self._ids = frozenset(self._by_text.values())
        self._writers = dict.fromkeys(controls.values(), Origin.TEMPLATE)
        self._writers |= dict.fromkeys(soft.values(), Origin.TEMPLATE | Origin.MODEL)
        """Who may write each mark."""
        self._texts = {number: text for text, number in self._by_text.items()}
        lengths: dict[str, set[int]] = {}
        for text in self._by_text:
            lengths.setdefault(text[0], set()).add(len(text))
        self._original = backend
        normalizes = self._normalised(_UNNORMALISED) != _UNNORMALISED
        marks = [token for token in added.values() if token.content in self._by_text]
        self._fickle = any(token.single_word or (token.normalized and normalizes) for token in marks)
        """Whether a mark is found depends on what stands beside it, so that counting marks does not do."""
        self._lengths = {first: sorted(of_first, reverse=True) for first, of_first in lengths.items()}
        self._start = _start_pattern(self._by_text)
        lead = f"{secrets.randbelow(10**24):024}"  # digits: no normalizer changes or joins them, and nobody guesses it
        self._names = {text: f"{lead}{number:07}" for text, number in self._by_text.items()}
        model = backend.model
        if isinstance(model, models.Unigram) or any(_is_made_by(model, text) for text in self._by_text):
            model = _renamed_model(backend, self._names)
        self.backend, self._restored = _renamed_tokenizer(backend, model, list(added.items()), self._names)
        unknown = getattr(model, "unk_token", None)
        self._unknown = None if unknown is None else model.token_to_id(unknown)

    def are_trusted(self, text: TracedText, token_ids: list[int]) -> bool:
        """Whether all marks among `token_ids`, which the tokenizer made of `text`, were written by those who may."""
        trusted = self._trusted(text)
        if self._fickle:
            return not self._is_forged(text, trusted)
        return [number for _, _, number in trusted] == [found for found in token_ids if found in self._ids]

    def _is_forged(self, text: TracedText, trusted: list[tuple[int, int, int]]) -> bool:
        """Whether a mark stands where it may not, or was destroyed."""
        bare, origins = plain(text), origins_of(text)
        encoding = self._original.encode(bare, add_special_tokens=False)
        places = set()
        for token_id, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if token_id not in self._ids:
                continue
            end = start + len(bare[start:end].rstrip())  # white space that the token swallows may be anybody's
            start = end - len(bare[start:end].lstrip())
            is_unknown = self._is_unknown(token_id, bare[start:end])
            if not is_unknown and not self._may_write(token_id, origins[start:end], text):
                return True
            places.add(end)
        # a mark that is found in normalised text is lost if a character of a request joins its last one
        return any(end not in places and unicodedata.combining(bare[end : end + 1] or "x") for _, end, _ in trusted)

    def _may_write(self, token_id: int, origins: bytes, text: TracedText) -> bool:
        """Whether characters of these origins may make a mark. Where it is not known which of several wrote them, they
        may if nobody else has said anything like the mark: that spoils no conversation that never mentions it."""
        if not origins.strip(_OF_TEMPLATE):
            return True
        allowed, kinds = self._writers[token_id], set(origins)
        if not all(kind & allowed for kind in kinds):
            return False
        others = [origin for origin in Origin if not origin & allowed and any(kind & origin for kind in kinds)]
        if not others or not text.said:
            return not others
        mark = self._texts[token_id]
        said = (one for origin in others for one in text.said[origin])
        return not any(_is_like(one, mark) or _is_like(self._normalised(one), mark) for one in said)

    def _is_unknown(self, token_id: int, text: str) -> bool:
        """The model has no token for this text; nobody wrote '<unk>'."""
        return token_id == self._unknown and self._original.id_to_token(token_id) not in (text, self._normalised(text))

    def _normalised(self, text: str) -> str:
        normalizer = self._original.normalizer
        return text if normalizer is None else str(normalizer.normalize_str(text))

    def renamed(self, text: TracedText) -> str:
        """What to encode with `backend`: `text` with private names in the place of trusted marks."""
        bare, pieces, at = plain(text), [], 0
        for start, end, _ in self._trusted(text):
            pieces += [bare[at:start], self._names[bare[start:end]]]
            at = end
        return "".join([*pieces, bare[at:]])

    def restored(self, token_ids: list[int]) -> list[int]:
        """Ids of the tokenizer from those of `backend`. Raises InvalidParameter if the model itself made a mark."""
        restored = self._restored
        for found in token_ids:
            if found in self._ids and found not in restored and found != self._unknown:
                raise InvalidParameter(
                    "prompt", self.backend.id_to_token(found), "text that this tokenizer can write without that token"
                )
        return [restored.get(found, found) for found in token_ids]

    def _trusted(self, text: TracedText) -> list[tuple[int, int, int]]:
        """(start, end, id) of the marks that the template wrote, or of soft ones that the model did.

        In characters of theirs that stand together the leftmost is found first, of several there the longest, as in the
        library.
        """
        bare, origins, by_text, search = plain(text), origins_of(text), self._by_text, self._start.search
        found = []
        for run in _NOT_OF_REQUEST.finditer(origins):
            at, end = run.span()
            while (start := search(bare, at, end)) is not None:
                at = start.start()
                for length in self._lengths[bare[at]]:
                    mark = bare[at : at + length]
                    if at + length <= end and mark in by_text:
                        if self._may_write(by_text[mark], origins[at : at + length], text):
                            found.append((at, at + length, by_text[mark]))
                        at += length
                        break
                else:
                    at += 1
        return found


def _is_like(said: str, mark: str) -> bool:
    """Whether a text has the beginning or end of a mark, or is what stands between its brackets."""
    inside = mark.strip("".join(char for char in mark if not char.isalnum()))
    return mark[:2] in said or mark[-2:] in said or said.strip() == inside


def _start_pattern(texts: Collection[str]) -> re.Pattern[str]:
    """Finds where a mark may begin, by its first two characters."""
    starts: dict[str, set[str]] = {}
    for text in texts:
        starts.setdefault(text[0], set()).add(text[1:2])
    return re.compile("|".join(
        re.escape(first) + ("" if "" in seconds else f"[{re.escape(''.join(sorted(seconds)))}]")
        for first, seconds in starts.items()
    ) or "(?!)")  # fmt: skip


def _is_made_by(model: models.Model, text: str) -> bool:
    """Whether the model itself makes the token of the characters of its text; BPE does if its merges lead there, and
    then also inside longer words."""
    number = model.token_to_id(text)
    return number is not None and [token.id for token in model.tokenize(text)] == [number]


def _renamed_model(backend: tokenizers.Tokenizer, names: dict[str, str]) -> models.Model:
    """A copy of the model in which no token has the text of a mark. Ids stay."""
    parts = json.loads(backend.to_str())
    model: dict[str, Any] = parts["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(text, text): number for text, number in model["vocab"].items()}
    else:  # Unigram
        model["vocab"] = [[names.get(text, text), score] for text, score in model["vocab"]]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if "merges" in model:
        prefix = model.get("continuing_subword_prefix") or ""
        pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"])
        model["merges"] = [
            pair for pair in pairs if names.keys().isdisjoint((*pair, pair[0] + pair[1].removeprefix(prefix)))
        ]
    copy = tokenizers.Tokenizer.from_str(json.dumps({**parts, "added_tokens": [], "post_processor": None}))
    renamed: models.Model = copy.model
    return renamed


def _renamed_tokenizer(
    backend: tokenizers.Tokenizer, model: models.Model, added: list[tuple[int, AddedToken]], names: dict[str, str]
) -> tuple[tokenizers.Tokenizer, dict[int, int]]:
    """(tokenizer on `model` with the added tokens, marks under their names; its ids → those of `backend`)."""
    made = tokenizers.Tokenizer(model)
    made.normalizer, made.pre_tokenizer = backend.normalizer, backend.pre_tokenizer
    n_model = made.get_vocab_size()
    if any(model.id_to_token(n_model + i) is not None for i in range(len(added))):
        # the vocabulary has holes: fresh ids begin beyond it
        n_fill = max(backend.get_vocab(with_added_tokens=False).values()) + 1 - n_model
        made.add_tokens([f"{secrets.randbelow(10**24):024}" for _ in range(n_fill)])
    tokens = []
    for _, token in added:
        flags = {name: getattr(token, name) for name in ("single_word", "lstrip", "rstrip", "normalized", "special")}
        if token.content in names:  # found whatever stands beside it
            flags |= {"single_word": False, "normalized": False}
        tokens.append(AddedToken(names.get(token.content, token.content), **flags))
    made.add_tokens(tokens)
    restored = {made.token_to_id(token.content): number for token, (number, _) in zip(tokens, added, strict=True)}
    return made, {found: number for found, number in restored.items() if found is not None}
