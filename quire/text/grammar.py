"""Grammars for constrained output: from `StructuredOutputsParams` to a matcher that says which tokens may come next.

Owns the translation into llguidance's grammars, their compilation, and a cache of compiled ones. Does not own which
sequence has which matcher (`text/matchers`). The library can overflow its stack and can loop for ever: whoever calls
this with a stranger's grammar does so in a process that may die (`engine/grammars/process`).
Invariants: a grammar that was compiled allows at least one token at its beginning; nothing is fetched; no error shows
more than a piece of the user's own text.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

import llguidance
import msgspec
from llguidance.gbnf_to_lark import any_to_lark

from quire.core.errors import SHOWN_CHARS, InvalidParameter, RequestError
from quire.core.failure import Code
from quire.core.plan import MASK_WORD_BITS
from quire.core.structured import StructuredOutputsParams, check_json
from quire.text.leading import LeadBound, Leading
from quire.text.matcher import Matcher, first_line
from quire.text.schema_check import checked_schema
from quire.text.schema_support import explained
from quire.text.tokenizer import Tokenizer

CACHE_BYTES: Final = 128 << 20
"""Of compiled grammars, estimated."""
MAX_CACHED_BYTES: Final = 32 << 20
"""Of one grammar: beyond it is compiled afresh, since the states that it met while it was used are never forgotten."""
_USE_COST: Final = 64 << 10
"""What one use may add to them."""
_BASE_COST: Final = 200 << 10
"""Bytes of a small compiled grammar, measured; the rest grows with its text."""
_LIMITS: Final = llguidance.LLParserLimits(
    initial_lexer_fuel=1_000_000, step_lexer_fuel=200_000, step_max_items=50_000, max_lexer_states=20_000,
    max_grammar_size=200_000, verbose_errors=False,
)  # fmt: skip
SPACE_PATTERN: Final = r"[\x20\x0A\x0D\x09]{1,32}"
"""White space between the parts of JSON: enough to indent, too little to be a way of never coming to the point."""

QUOTE: Final = '"'

JsonObject = dict[str, Any]


@dataclasses.dataclass(slots=True)
class _Cached:
    """A compiled grammar, and what it takes, estimated."""

    matcher: Matcher
    """At its beginning."""
    n_bytes: int


class GrammarCompiler:
    """Compiles grammars for one tokenizer. Safe to use from several threads."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        logits_width: int,
        end_token_ids: Sequence[int],
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        """end_token_ids: those beyond the tokenizer are never sampled, and left out."""
        self._tokenizer = tokenizer
        self._width = logits_width
        known = sorted({one for one in end_token_ids if one < len(tokenizer)})
        self._end_ids = known or [one for one in (tokenizer.eos_id,) if one is not None]
        self._vocabulary: llguidance.LLTokenizer | None = None
        self._lock = threading.Lock()
        self._cache: collections.OrderedDict[str, _Cached] = collections.OrderedDict()
        self._cache_bytes = cache_bytes
        self._cached_bytes = 0

    def prepare(self) -> None:
        """Read the vocabulary now, not with the first grammar. RequestError if the model has no end token."""
        self._vocabulary_once()

    def cached(self, grammar: str) -> Matcher | None:
        """A fresh matcher if this grammar is compiled already."""
        with self._lock:
            found = self._cache.get(grammar)
            if found is None:
                return None
            self._cache.move_to_end(grammar)
            matcher = found.matcher.copy()
            found.n_bytes += _USE_COST
            self._cached_bytes += _USE_COST
            if found.n_bytes > MAX_CACHED_BYTES:
                self._forget(grammar)
            self._shrink()
            return matcher

    def leading(self, bound: LeadBound) -> Leading:
        """A sequence of a request with this bound, at its beginning."""
        mark_ids = self._tokenizer.encode(bound.mark, add_special_tokens=False)
        return Leading(bound, mark_ids, self._tokenizer.token_bytes)

    def compile(self, grammar: str) -> Matcher:
        """A fresh matcher at the beginning of a grammar made by `grammar_of`. RequestError if it is of no use."""
        found = self.cached(grammar)
        if found is not None:
            return found
        inner = llguidance.LLMatcher(self._vocabulary_once(), grammar, log_level=0, limits=_LIMITS)
        matcher = Matcher(inner, -(-len(self._tokenizer) // MASK_WORD_BITS))
        self._check(matcher, grammar)
        with self._lock:
            if grammar not in self._cache:
                self._cache[grammar] = _Cached(matcher.copy(), _cost_of(grammar))
                self._cached_bytes += self._cache[grammar].n_bytes
            self._shrink()
        return matcher

    def _forget(self, grammar: str) -> None:
        self._cached_bytes -= self._cache.pop(grammar).n_bytes

    def _shrink(self) -> None:
        while self._cached_bytes > self._cache_bytes and len(self._cache) > 1:
            self._forget(next(iter(self._cache)))

    def _check(self, matcher: Matcher, grammar: str) -> None:
        """Refuse what does not compile, what is too much for one mask, and what has no text at all."""
        if not matcher.error:
            probe = matcher.copy()
            mask = bytearray(probe.mask())
            for end in self._end_ids:
                mask[end // 8] &= ~(1 << end % 8)
            if any(mask) and not probe.error:
                return
            if not any(mask):
                raise refused("no text fits it")
            matcher = probe
        raise refused(explained(matcher.error, grammar))

    def _vocabulary_once(self) -> llguidance.LLTokenizer:
        with self._lock:
            if self._vocabulary is None:
                if not self._end_ids:
                    raise refused("this model has no end token")
                self._vocabulary = llguidance.LLTokenizer(
                    llguidance.TokenizerWrapper(_Vocabulary(self._tokenizer, self._end_ids[0])),
                    n_vocab=self._width,
                    eos_token=self._end_ids,
                )
            return self._vocabulary


def _cost_of(grammar: str) -> int:
    return _BASE_COST + 16 * len(grammar)


class _Vocabulary:
    """What llguidance asks of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer, end_id: int) -> None:
        special = tokenizer.special_ids
        self._tokenizer = tokenizer
        self.eos_token_id = end_id
        self.bos_token_id = tokenizer.bos_id
        self.special_token_ids = sorted(special)
        self.tokens = [(b"\xff" if i in special else b"") + tokenizer.token_bytes(i) for i in range(len(tokenizer))]

    def __call__(self, text: str) -> list[int]:
        if not isinstance(text, str):
            raise TypeError("text, not bytes")  # by this llguidance learns that it must send text
        return self._tokenizer.encode(text, add_special_tokens=False)


def grammar_of(params: StructuredOutputsParams) -> str:
    """llguidance's grammar, as JSON text, for verified parameters. RequestError for what can be seen here."""
    body: JsonObject
    match params.kind:
        case "json":
            body = {"json_schema": _with_options(_checked(params.json, "structured_outputs.json"), params)}
        case "json_object":
            body = {"json_schema": _with_options({"type": "object"}, params)}
        case "regex":
            body = {"lark_grammar": f"start: /{llguidance.regex_to_lark(params.regex or '', '')}/"}
        case "choice":
            body = {"lark_grammar": "start: " + " | ".join(map(quoted, dict.fromkeys(params.choice or [])))}
        case "grammar":
            body = {"lark_grammar": _lark(params.grammar or "")}
        case "free":
            body = {"lark_grammar": "start: /(?s:.*)/"}
        case "calls":
            body = {"lark_grammar": params.calls or ""}
        case _:
            body = {"lark_grammar": _tags(params)}
    if params.frame is not None:
        return json.dumps({"grammars": _framed(params.frame, body, params)})
    grammars = [body]
    if params.calls is not None and params.kind != "calls":
        grammars = [{"lark_grammar": "start: @body | @calls"}, {"name": "body", **body}]
        grammars.append({"name": "calls", "lark_grammar": params.calls})
    if params.begins_after is not None:
        first = "" if params.may_begin_with is None else quoted(params.may_begin_with)
        lead = (
            f"start: lead{'?' if first else ''} SPACE @rest\n"
            f"lead[lazy]: {first} /(?s:.*)/ {quoted(params.begins_after)}\nSPACE: /[ \\t\\n\\r]{{0,16}}/"
        )
        grammars[0] = {"name": "rest", **grammars[0]}
        grammars.insert(0, {"lark_grammar": lead})
    return json.dumps({"grammars": grammars})


def _framed(frame: str, body: JsonObject, params: StructuredOutputsParams) -> list[JsonObject]:
    """The frame, and what it names."""
    grammars: list[JsonObject] = [{"lark_grammar": frame}]
    if params.kind != "calls":
        grammars.append({"name": "body", **body})
    if params.calls is not None:
        grammars.append({"name": "calls", "lark_grammar": params.calls})
    return grammars


def refused(reason: str) -> RequestError:
    """The error for a grammar that is of no use."""
    return RequestError(
        f"The output cannot be constrained by this schema or grammar: {reason}.",
        param="structured_outputs",
        code=Code.INVALID_GRAMMAR,
    )


def quoted(text: str) -> str:
    """A text as a literal of a Lark grammar."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _schema(value: JsonObject | str | bool | None, param: str) -> JsonObject | bool:
    """A JSON schema from JSON text or an object."""
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError) as error:
            raise InvalidParameter(param, value, f"valid JSON ({str(error)[:SHOWN_CHARS]})") from None
        check_json(value, param)
    if not isinstance(value, dict | bool):
        raise InvalidParameter(param, value, "a JSON schema: an object")
    return value


def _checked(value: JsonObject | str | bool | None, param: str) -> JsonObject | bool:
    found: JsonObject | bool = checked_schema(_schema(value, param), param)
    return found


def _with_options(schema: JsonObject | bool, params: StructuredOutputsParams) -> JsonObject | bool:
    if params.disable_additional_properties:
        _close_objects(schema)
    options: JsonObject = {"whitespace_pattern": params.whitespace_pattern or SPACE_PATTERN}
    if params.disable_any_whitespace:
        options = {"whitespace_flexible": False}
    if isinstance(schema, bool):
        if not schema:
            raise refused("no text fits it")
        schema = {}
    return {**schema, "x-guidance": options}


def _close_objects(node: object) -> None:
    if isinstance(node, dict):
        if "properties" in node and "additionalProperties" not in node and "patternProperties" not in node:
            node["additionalProperties"] = False
        for child in node.values():
            _close_objects(child)
    elif isinstance(node, list):
        for child in node:
            _close_objects(child)


def _lark(grammar: str) -> str:
    """Lark as it is; GBNF and EBNF are translated. The library says what is wrong with them by whatever exception."""
    try:
        return any_to_lark(grammar)
    except Exception as error:
        raise refused(f"it is neither Lark nor GBNF: {first_line(str(error)) or type(error).__name__}") from None


class _Structure(msgspec.Struct, forbid_unknown_fields=True):
    begin: str
    schema: JsonObject | bool | str | None = None
    end: str = ""


class _TagForm(msgspec.Struct, forbid_unknown_fields=True):
    structures: list[_Structure]
    triggers: list[str]
    type: str = "structural_tag"


def _tags(params: StructuredOutputsParams) -> str:
    """Free text in which each trigger must begin one of the structures."""
    param = "structured_outputs.structural_tag"
    try:
        form = msgspec.convert(_schema(params.structural_tag, param), _TagForm)
    except msgspec.ValidationError as error:
        raise InvalidParameter(param, str(error), "an object with structures and triggers") from None
    if not form.structures or not form.triggers or not all(form.triggers):
        raise InvalidParameter(param, "no structures or triggers", "given with at least one of each")
    parts = []
    for at, one in enumerate(form.structures):
        trigger = next((trigger for trigger in form.triggers if one.begin.startswith(trigger)), None)
        if trigger is None:
            raise InvalidParameter(f"{param}.structures[{at}].begin", one.begin, "a text that starts with a trigger")
        schema = _with_options(_checked({} if one.schema is None else one.schema, param), params)
        parts.append((trigger, one.begin, f"%json {json.dumps(schema)}", one.end))
    return tagged_text(parts)


def tagged_text(
    parts: Sequence[tuple[str, str, str, str]], literal: Callable[[str], str] = quoted, *, at_most_one: bool = False
) -> str:
    """Lark for free text with constrained parts, each (trigger, begin, grammar, end); begin starts with trigger.

    A trigger in the text must become one of the parts that start with it. at_most_one: nothing follows the first.
    literal: how a trigger is written, for those that are tokens of their own.
    """
    lines = []
    heads = {trigger: f"head_{at}" for at, trigger in enumerate(dict.fromkeys(part[0] for part in parts))}
    for trigger, name in heads.items():
        bodies = [
            f"({' '.join(filter(None, (_literal(begin[len(trigger) :]), grammar, _literal(end))))})"
            for other, begin, grammar, end in parts
            if other == trigger
        ]
        written = literal(trigger)
        lines.append(f"{name}{'[lazy]' if written.startswith(QUOTE) else ''}: /(?s:.*)/ {written}")
        lines.append(f"tag_{name}: {name} ({' | '.join(bodies)})")
    any_tag = f"({' | '.join(f'tag_{name}' for name in heads.values())})"
    start = f"{any_tag} | rest" if at_most_one else f"{any_tag}* rest"
    return f"start: {start}\nrest: /(?s:.*)/\n" + "\n".join(lines)


def _literal(text: str) -> str:
    return quoted(text) if text else ""
