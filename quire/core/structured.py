"""What an output must look like: the public `StructuredOutputsParams` (vLLM's names) and its checks.

Owns names, types and bounds. Does not own grammars nor their compilation (`text/grammar`), which finds what only a
compiler can find: a schema that means nothing, a keyword that is not supported, a grammar that is too large.
"""

from __future__ import annotations

import math
from typing import Any, Final

import msgspec

from quire.core.errors import ClashingParameter, InvalidParameter, Words
from quire.core.spelling import NamedArguments

MAX_GRAMMAR_CHARS: Final = 512 * 1024
"""Characters of a schema or grammar."""
MAX_EBNF_CHARS: Final = 128 * 1024
MAX_REGEX_CHARS: Final = 32 * 1024
MAX_CHOICES: Final = 10_000
MAX_NODES: Final = 20_000
"""Values in a JSON schema, keys not counted."""
MAX_DEPTH: Final = 64
KINDS: Final = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


class StructuredOutputsParams(
    msgspec.Struct, metaclass=NamedArguments, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """Exactly one of `KINDS` says what the text must be; the other fields say how."""

    json: dict[str, Any] | str | bool | None = None
    """A JSON schema, as an object or as JSON text."""
    regex: str | None = None
    """A regular expression (Rust's syntax, no look-around or back-references) for the whole text."""
    choice: list[str] | None = None
    """The text is one of these."""
    grammar: str | None = None
    """A context-free grammar, as Lark or GBNF/EBNF, from the rule `start` or `root`."""
    json_object: bool | None = None
    """True: any JSON object."""
    structural_tag: dict[str, Any] | str | None = None
    """Free text in which a trigger begins a constrained part, as an object or JSON text of OpenAI's and vLLM's shape:
    {"type": "structural_tag", "structures": [{"begin": ..., "schema": ..., "end": ...}], "triggers": [...]}."""
    disable_any_whitespace: bool | None = None
    """JSON without white space between its parts."""
    disable_additional_properties: bool | None = None
    """Objects of a schema that does not say otherwise have no properties besides those that it names."""
    whitespace_pattern: str | None = None
    """A regular expression for white space between the parts of JSON."""
    begins_after: str | None = None
    """The constraint begins after the first occurrence of this text, for instance the end of a model's reasoning; white
    space may follow it. What comes before is free."""
    may_begin_with: str | None = None
    """With `begins_after`: only a text that begins with this is free up to there; any other is constrained at once."""
    begins_within: int | None = None
    """With `begins_after`: at most so many tokens come before that text, which is then written in any case. Given
    without one of `KINDS` what follows is free."""
    frame: str | None = None
    """A Lark grammar of the whole text, in which the constraint is named `@body` and that of tool calls `@calls`. It
    takes the place of what `begins_after` says; together they bound what comes before by `begins_within`."""
    calls: str | None = None
    """A Lark grammar of tool calls. Alone it is what the text must fit; beside one of `KINDS` the text fits either."""

    @property
    def kind(self) -> str:
        """The one of `KINDS` that is given, or `calls`, or `free` (InvalidParameter unless it is exactly one)."""
        given = [name for name in KINDS if getattr(self, name) is not None]
        if self.json_object is False:
            given.remove("json_object")
        if not given and self.calls is not None:
            return "calls"
        if not given and self.begins_within is not None:
            return "free"
        if len(given) != 1:
            found = " and ".join(given) or "none of them"
            said = f"takes exactly one of {', '.join(KINDS)}; it was given {found}"
            raise ClashingParameter("structured_outputs", said)
        return given[0]

    def verify(self) -> None:
        """Check types and sizes; raises InvalidParameter. What the text means is not looked at."""
        kind = self.kind
        if kind in ("json", "structural_tag"):
            check_json(getattr(self, kind), f"structured_outputs.{kind}")
        try:
            msgspec.convert(msgspec.structs.asdict(self), StructuredOutputsParams)
        except msgspec.ValidationError as error:
            raise self._mistyped(f"{error}") from None
        within = self.begins_within
        if within is not None and (within < 0 or self.begins_after is None):
            raise InvalidParameter("structured_outputs.begins_within", within, "0 or more, together with begins_after")
        for name, limit in (
            ("regex", MAX_REGEX_CHARS),
            ("whitespace_pattern", MAX_REGEX_CHARS),
            ("begins_after", 1024),
            ("may_begin_with", 1024),
            ("calls", 4 * MAX_GRAMMAR_CHARS),
            ("frame", MAX_EBNF_CHARS),
            ("grammar", MAX_EBNF_CHARS),
            ("json", MAX_GRAMMAR_CHARS),
            ("structural_tag", MAX_GRAMMAR_CHARS),
        ):
            value = getattr(self, name)
            if isinstance(value, str):
                _check_text(name, value, limit)
        if self.choice is not None:
            _check_choices(self.choice)

    def _mistyped(self, said: str) -> InvalidParameter:
        """said: msgspec's words, such as "Expected `str | null`, got `int` - at `$.regex`"."""
        name = said.partition("`$.")[2].partition("`")[0].partition("[")[0]
        types = said.partition("Expected `")[2].partition("`")[0].split(" | ")
        limit = " or ".join([_TYPES[one] for one in types if one in _TYPES])
        return InvalidParameter(
            f"structured_outputs.{name}", getattr(self, name), "a list of texts" if name == "choice" else limit
        )


_TYPES: Final = {
    "str": "a text", "bool": "true or false", "int": "an integer", "object": "an object whose keys are texts",
}  # fmt: skip


def check_json(value: object, param: str) -> None:
    """InvalidParameter if a value is not of JSON, is nested too deeply, or has too many parts or characters. Never
    recurses."""
    n_nodes = n_chars = 0
    level = [value]
    for depth in range(MAX_DEPTH + 2):
        if depth > MAX_DEPTH:
            raise InvalidParameter(param, "a schema", f"nested at most {MAX_DEPTH} levels deep")
        below: list[object] = []
        for node in level:
            if isinstance(node, dict):
                if not all(isinstance(key, str) for key in node):
                    raise InvalidParameter(param, node, "made of objects whose keys are texts")
                n_chars += sum([len(key) for key in node])
                below += node.values()
            elif isinstance(node, list | tuple):
                below += node
            elif isinstance(node, str):
                n_chars += len(node)
            elif isinstance(node, int) and not -(2**63) <= node < 2**63:
                raise InvalidParameter(param, node, "made of integers of at most 64 bits")
            elif not isinstance(node, int | float | None) or (isinstance(node, float) and not math.isfinite(node)):
                raise InvalidParameter(param, node, "made of values that JSON has")
        n_nodes += len(level)
        if n_nodes > MAX_NODES or n_chars > MAX_GRAMMAR_CHARS:
            raise InvalidParameter(
                param, Words("a schema"), f"at most {MAX_NODES} values and {MAX_GRAMMAR_CHARS} characters large"
            )
        if not below:
            return
        level = below


def _check_text(name: str, value: str, limit: int) -> None:
    param = f"structured_outputs.{name}"
    if not value or len(value) > limit:
        raise InvalidParameter(param, value, f"a text of 1 to {limit} characters")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidParameter(param, value, "valid Unicode text (it has unpaired surrogates)") from None


def _check_choices(choices: list[str]) -> None:
    param = "structured_outputs.choice"
    if not 0 < len(choices) <= MAX_CHOICES:
        raise InvalidParameter(param, Words(f"a list of {len(choices):,}"), f"a list of 1 to {MAX_CHOICES} texts")
    if sum(map(len, choices)) > MAX_GRAMMAR_CHARS:
        raise InvalidParameter(param, Words("a list"), f"at most {MAX_GRAMMAR_CHARS} characters long in all")
    for choice in choices:
        _check_text("choice", choice, MAX_GRAMMAR_CHARS)
