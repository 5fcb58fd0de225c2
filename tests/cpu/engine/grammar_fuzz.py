"""Random and mutated constraints of every kind, for a trial of each: `python tests/cpu/engine/grammar_fuzz.py 10000`.

Every case must pass or be refused as the request's own fault; a sample of what passes is followed beside a sequence
whose masks are known. Whatever a case says contains `MARK`, which must not show in any log.
"""

from __future__ import annotations

import collections
import json
import random
import string
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "text"))
from schema_cases import CASES

from quire.core.errors import InvalidParameter, RequestError
from quire.core.failure import Code
from quire.core.plan import SpanDrafts
from quire.core.sampling import SamplingParams
from quire.core.structured import StructuredOutputsParams
from quire.engine.grammars.links import Masks, MatcherLinks
from quire.engine.grammars.processes import GrammarProcesses
from quire.engine.grammars.trials import GrammarTrials, Passed, key_of

MARK = "xyzzyplugh"
_KEYWORDS = (
    "type properties required items enum const minimum maximum minLength maxLength pattern format anyOf oneOf allOf not"
    " $ref $defs additionalProperties patternProperties minItems maxItems prefixItems multipleOf if then else default"
    " exclusiveMinimum uniqueItems propertyNames minProperties maxProperties contains dependentRequired x-guidance"
)
_PIECES = (
    '"a" /b+/ /[a-z]{2,5}/ | ( ) * + ? ~ ~1..3 [ ] : start rule A %ignore %import %declare %json {} {"type":"integer"}'
    ' %llguidance %regex -> -1 {,5} {1000} \\n "" // /(/ "\\x00" é 😀 $ ^ . .. <[12]> @x x[capture] [lazy] & root ::='
    " ::= [^] [^a] [\\u0041-z] # == , ; // /*/ /a|/ (?i) \\d \\w \\b (?=a) (?:x) {0} .WS temperature=1"
)
_REGEX_PIECES = (
    "a b . .* .+ [a-z] [^x] \\d \\w \\s \\b \\p{L} \\x41 ( ) (?: (?i) (?P<n> | * + ? {3} {2,} {1,500} {1000000} ^ $"
    " \\\\ \\ [ ] [[:alpha:]] (?s) é 😀 [] & ~ \\u0041 \\x{10FFFF} (?<= (?! \\1 \\z [a&&b] [a--b]"
)
GOOD_PIECES = ["a", "b?", ".", ".*", "[a-z]+", "[^x]{2,5}", "\\d", "(x|y|zz)*", "é", "(ab|a)?", "{3}", "(?i:k)"]
KEYWORDS, PIECES, REGEX_PIECES = (one.split(" ") for one in (_KEYWORDS, _PIECES, _REGEX_PIECES))


def scalar(chance: random.Random) -> Any:
    return chance.choice(
        [0, -1, 1.5, 1e308, 10**30, True, None, "", MARK, "string", "integer", "number", "object", "array", "null",
         "date-time", "uuid", "^a+$", "(a|b)*", "#", "#/$defs/a", "#/$defs/b", "#/properties/a", "http://x/y", [], {},
         ["a"], ["string", "null"]]
    )  # fmt: skip


def random_schema(chance: random.Random, depth: int = 0) -> Any:
    if depth > 4 or chance.random() < 0.1:
        return scalar(chance)
    node: dict[str, Any] = {}
    for _ in range(chance.randrange(1, 5)):
        key = chance.choice(KEYWORDS)
        if key in ("properties", "$defs", "patternProperties"):
            node[key] = {chance.choice(["a", "b", MARK, ""]): random_schema(chance, depth + 1) for _ in range(2)}
        elif key in ("anyOf", "oneOf", "allOf", "prefixItems"):
            node[key] = [random_schema(chance, depth + 1) for _ in range(chance.randrange(4))]
        elif key in ("items", "not", "if", "then", "else", "contains", "propertyNames", "additionalProperties"):
            node[key] = random_schema(chance, depth + 1)
        elif key == "type":
            node[key] = chance.choice(["string", "integer", "number", "object", "array", "null", "boolean", "hiccup"])
        else:
            node[key] = scalar(chance)
    return node


def chain(chance: random.Random) -> Any:
    """References that name each other: a chain, a cycle, or a tree, of many definitions."""
    n, form = chance.choice([2, 50, 700, 3000, 9000]), chance.randrange(3)
    names = [f"d{i}" for i in range(n)]
    ends = {0: n - 1, 1: 0, 2: n // 2}[form]
    following = {name: {"$ref": f"#/$defs/{names[i + 1 if i + 1 < n else ends]}"} for i, name in enumerate(names)}
    if form == 0:
        following[names[-1]] = {"const": MARK}
    if form == 2:
        following = {name: {"anyOf": [one, {"const": name}]} for name, one in following.items()}
    return {"$defs": following, "$ref": "#/$defs/d0"}


def wide(chance: random.Random) -> Any:
    n = chance.choice([10, 400, 3000, 10_000])
    properties = {f"{MARK}{i}": {"type": chance.choice(["string", "integer", "null"])} for i in range(n)}
    schema = {"type": "object", "properties": properties}
    return schema if chance.random() < 0.5 else {**schema, "required": list(properties)}


def mutated(chance: random.Random, text: str) -> str:
    """A few pieces cut, doubled, swapped or replaced."""
    for _ in range(chance.choice([0, 1, 1, 1, 2, 5])):
        at, to = sorted(chance.randrange(len(text) + 1) for _ in range(2))
        kind = chance.randrange(4)
        if kind == 0:
            text = text[:at] + text[min(to, at + 8) :]
        elif kind == 1:
            text = text[:to] + text[at:to][:64] * chance.choice([1, 1, 2, 50]) + text[to:]
        elif kind == 2:
            text = text[:at] + chance.choice([*PIECES, *string.printable]) + text[at:]
        else:
            text = text[:at] + chance.choice(KEYWORDS) + text[to:]
    return text[:4000] or "a"


def schema(chance: random.Random) -> dict[str, Any]:
    draw = chance.random()
    if draw < 0.45:
        return {"json": random_schema(chance)}
    if draw < 0.9:
        text = mutated(chance, json.dumps(chance.choice(CASES)).replace('"name"', f'"{MARK}"'))
        return {"json": text}
    return {"json": chain(chance) if draw < 0.97 else wide(chance)}


def regex(chance: random.Random) -> dict[str, Any]:
    pieces = REGEX_PIECES if chance.random() < 0.5 else GOOD_PIECES
    return {"regex": "".join(chance.choice([*pieces, MARK]) for _ in range(chance.randrange(1, 25)))}


LARK = [
    f'start: "{MARK}" rule+\nrule: /[a-z]+/ | "(" rule ")"\n%ignore / +/',
    '%import common.WS\nstart: A B? | start "," A\nA: "x"~2..5\nB: /[0-9]+/',
    'start: /(?s:.*)/ tail\ntail[lazy]: /.*/ "."',
    'start: %json {"type":"object","properties":{"a":{"type":"string"}}} "!"',
]
GBNF = [
    f'root ::= "{MARK}" expr\nexpr ::= term ("+" term)*\nterm ::= [0-9]+ | "(" expr ")"',
    "root ::= [a-z]{2,5} ws\nws ::= [ \\t\\n]*",
]


def words(chance: random.Random) -> str:
    return " ".join(chance.choice([*PIECES, MARK]) for _ in range(chance.randrange(1, 8)))


def lark(chance: random.Random) -> dict[str, Any]:
    draw = chance.random()
    if draw < 0.1:
        n = chance.choice([10, 500, 2700, 9000])
        rules = [f"r{i}: r{i + 1} | r{i + 1} r{i + 1}" for i in range(n)]
        return {"grammar": "\n".join([*rules, f'r{n}: "x"', "start: r0"])}
    if draw < 0.55:
        return {"grammar": mutated(chance, chance.choice(LARK))}
    return {"grammar": "\n".join(["start: rule A", *(f"{name}: {words(chance)}" for name in ("rule", "A", "B"))])}


def gbnf(chance: random.Random) -> dict[str, Any]:
    if chance.random() < 0.5:
        return {"grammar": mutated(chance, chance.choice(GBNF))}
    return {"grammar": "\n".join(f"{name} ::= {words(chance)}" for name in ("root", "A", "rule"))}


def tag(chance: random.Random) -> dict[str, Any]:
    begin = chance.choice(["<f=a>", "<f>", "", MARK, "é", "\n"])
    one = {"begin": begin, "schema": random_schema(chance), "end": chance.choice(["</f>", "", MARK])}
    structures = [one] * chance.choice([1, 1, 2, 300])
    form = {"type": "structural_tag", "structures": structures, "triggers": ["<f", begin[:2]]}
    if chance.random() < 0.5:
        return {"structural_tag": mutated(chance, json.dumps(form))}
    return {"structural_tag": form}


KINDS: dict[str, Callable[[random.Random], dict[str, Any]]] = {
    "schema": schema, "regex": regex, "lark": lark, "gbnf": gbnf, "tag": tag,
}  # fmt: skip


class Fuzz:
    """Trials and matchers of one engine under a storm of cases."""

    def __init__(self, processes: GrammarProcesses, seed: int = 0) -> None:
        self.processes, self.chance = processes, random.Random(seed)
        self.trials, self.links = GrammarTrials(processes), MatcherLinks(processes, on_blame=self._blame)
        self.outcomes: collections.Counter[str] = collections.Counter()
        self.blamed = 0
        self._handle = 1
        passed = self._tried(StructuredOutputsParams(regex="[a-f]+"))
        assert isinstance(passed, Passed)
        self._canary = passed
        self.links.begin([1], passed.grammar, passed.compile_s)
        self._await_begun()
        self.expected = self._turn([], [1]).bits.tobytes()

    def close(self) -> None:
        self.trials.close()
        self.links.close()
        self.processes.close()

    def run(self, kind: str, n_cases: int) -> None:
        for number in range(n_cases):
            fields = KINDS[kind](self.chance)
            outcome = self._one(fields)
            self.outcomes[f"{kind}: {outcome}"] += 1
            if number % 50 == 0:
                assert self._turn([], [1]).bits.tobytes() == self.expected, fields

    def _one(self, fields: dict[str, Any]) -> str:
        params = StructuredOutputsParams(**fields)
        try:
            SamplingParams(structured_outputs=params).verify(4096, 20)
            found = self._tried(params)
        except RequestError as error:
            assert error.code in (Code.INVALID_GRAMMAR, InvalidParameter.code), (error.code, fields)
            assert len(error.message) < 1000
            return "refused"
        if self.chance.random() < 0.2:
            self._follow(found)
        return "passed"

    def _tried(self, params: StructuredOutputsParams) -> Passed:
        return self.trials.submit(*key_of(params), params, "").result(300)

    def _follow(self, found: Passed) -> None:
        """Some random moves, beside the canary."""
        self._handle += 1
        handle = self._handle
        self.links.begin([handle], found.grammar, found.compile_s)
        if not self._await_begun():
            masks = self._turn([], [1, handle])
            for _ in range(8):
                tokens = np.flatnonzero(np.unpackbits(masks.bits[1].view(np.uint8), bitorder="little")).tolist()
                if masks.ends or not tokens:
                    break
                move = [(handle, [self.chance.choice(tokens)])]
                masks = self._turn(move, [1, handle], [SpanDrafts(), self._drafts()], 3)
        self.links.drop([handle])

    def _turn(self, *asked: Any) -> Masks:
        self.links.ask(*asked)
        return self.links.answer()

    def _drafts(self) -> SpanDrafts:
        """A chain, or a tree."""
        tokens = [self.chance.choice([2, 12, 14, 72, self.chance.randrange(3, 4096)]) for _ in range(4)]
        return SpanDrafts(tokens, self.chance.choice([[], [-1, 0, 0, -1]]))

    def _await_begun(self) -> bool:
        """True if the newest sequence has ended already."""
        deadline_s = time.monotonic() + 120
        while time.monotonic() < deadline_s:
            for begun in self.links.begun(1.0):
                return bool(begun.ends)
        raise AssertionError("a grammar that has passed its trial is not compiled")

    def _blame(self, _: int) -> None:
        self.blamed += 1

    def memory_bytes(self) -> int:
        """Of the first process, which must not grow, and of this one."""
        assert self.processes._process is not None
        return psutil.Process(self.processes._process.pid).memory_info().rss + psutil.Process().memory_info().rss


def main() -> None:
    from test_structured_output import settings

    n_cases = int(sys.argv[1])
    fuzz = Fuzz(GrammarProcesses(settings(compile_s=1.0)), seed=int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    for kind in KINDS:
        start_s, before = time.monotonic(), fuzz.memory_bytes()
        fuzz.run(kind, n_cases)
        found = {name: n for name, n in fuzz.outcomes.items() if name.startswith(kind)}
        grown = (fuzz.memory_bytes() - before) / 2**20
        taken_s = time.monotonic() - start_s
        print(found, f"{taken_s:.0f} s, memory {grown:+.1f} MiB, matchers blamed {fuzz.blamed}", flush=True)
    fuzz.close()


if __name__ == "__main__":
    main()
