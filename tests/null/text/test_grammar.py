"""Grammars: what is compiled, refused, cached, and how they nest."""

from __future__ import annotations

import json
import pathlib
import re
import typing
from typing import Any

import psutil
import pytest
from reading import matcher_behind
from small_tokenizers import byte_level
from tokenizers import AddedToken

import quire
from quire.core.errors import RequestError
from quire.core.failure import Code
from quire.core.structured import StructuredOutputsParams
from quire.serve.config import ToolCallParser
from quire.text import grammar as grammars
from quire.text import harmony
from quire.text.grammar import GrammarCompiler, grammar_of
from quire.text.grammar_trial import tried
from quire.text.message import MessageReader
from quire.text.schema_support import INSTEAD
from quire.text.tokenizer import HfTokenizer
from quire.text.tool_calls import FORMATS
from quire.text.tool_formats import marks_of, reader_of
from quire.text.tool_grammar import OfferedTool, auto_grammar, call_grammar
from quire.text.xml_calls import XML_FORMATS
from quire.text.xml_grammar import VALUES

FOLDER = pathlib.Path(quire.__file__).parent / "_models" / "demo"
pytestmark = pytest.mark.skipif(not FOLDER.exists(), reason="needs the bundled model's tokenizer")


@pytest.fixture(scope="module")
def tokenizer() -> HfTokenizer:
    return HfTokenizer.load(FOLDER)


@pytest.fixture(scope="module")
def compiler(tokenizer: HfTokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, 4096, [2, 0])


def fits(compiler: GrammarCompiler, tokenizer: HfTokenizer, text: str, **kind: object) -> bool:
    """Whether the whole text is allowed token by token, and the end after it, and only there where it is complete."""
    matcher = matcher_behind(compiler, tokenizer, text, StructuredOutputsParams(**kind))
    return matcher is not None and bool(matcher.mask()[0] >> 2 & 1)


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        ({"json": {"type": "object"}}, '{"a": 1}', '{"a": '),
        ({"json": {"const": "é\n"}}, '"é\\n"', '"e"'),
        ({"json": {"type": "object"}, "disable_any_whitespace": True}, '{"a":1}', '{"a": 1}'),
        ({"json": {"type": "object"}, "whitespace_pattern": "_?"}, '{_"a":1}', '{ "a":1}'),
        ({"json": {"properties": {"a": {}}}, "disable_additional_properties": True}, '{"a":1}', '{"b":1}'),
        ({"regex": "a/b\\d"}, "a/b1", "a/b"),
        ({"choice": ['a"b', "é\n", "\x7f\\x"]}, "é\n", "é"),
        ({"grammar": 'root ::= "yes" | "no" [0-9]+'}, "no12", "maybe"),
        ({"grammar": 'start: "yes" | "no" /[0-9]+/'}, "no12", "no"),
        ({"json_object": True, "begins_after": "</think>"}, "<think> {x} </think>\n\n{}", "<think> {}"),
        ({"regex": "ab", "begins_after": "</think>", "may_begin_with": "<think>"}, "ab", "x</think>ab"),
        ({"regex": "ab", "begins_after": "</think>", "may_begin_with": "<think>"}, "<think>x</think> ab", "<think>ab"),
        ({"regex": "ab", "calls": 'start: "call " /[0-9]/'}, "call 1", "call"),
        ({"regex": "ab", "calls": 'start: "call " /[0-9]/', "begins_after": "."}, "x. ab", "ab"),
        (
            {
                "structural_tag": {
                    "structures": [{"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"}],
                    "triggers": ["<f="],
                }
            },
            "Hi <f=a>3</f> x",
            "Hi <f=b>3</f>",
        ),
    ],
)
def test_what_fits(
    compiler: GrammarCompiler, tokenizer: HfTokenizer, kind: dict[str, object], good: str, bad: str
) -> None:
    assert fits(compiler, tokenizer, good, **kind)
    assert not fits(compiler, tokenizer, bad, **kind)


TOOLS = [
    OfferedTool(
        "f",
        {
            "type": "object",
            "properties": {"a": {"$ref": "#/$defs/x"}},
            "required": ["a"],
            "$defs": {"x": {"type": "integer"}},
        },
        True,
    ),
    OfferedTool("g.h", {"type": "object", "properties": {}, "not": {"required": ["a"]}}, False),
]
SAMPLES = {
    "hermes": '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>',
    "llama3_json": '{"name": "f", "parameters": {"a": 1}}',
    "mistral": '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]',
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
    '{"a": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>"
    '{"a": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
}
XML_SAMPLES = {
    "glm45": "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
    "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">1</parameter>\n</invoke>\n'
    "</minimax:tool_call>",
}
SAMPLES |= XML_SAMPLES
V3, V31 = (SAMPLES[style].removesuffix("<｜tool▁calls▁end｜>") for style in ("deepseek_v3", "deepseek_v31"))
TWICE = {
    "hermes": SAMPLES["hermes"] + "\n" + SAMPLES["hermes"],
    "llama3_json": SAMPLES["llama3_json"] + "; " + SAMPLES["llama3_json"],
    "mistral": SAMPLES["mistral"][:-1] + ", " + '{"name": "g.h", "arguments": {}}]',
    "deepseek_v3": V3 + "\n" + SAMPLES["deepseek_v3"].removeprefix("<｜tool▁calls▁begin｜>"),
    "glm45": XML_SAMPLES["glm45"] + "\n" + "<tool_call>g.h\n</tool_call>",
    "qwen3_coder": XML_SAMPLES["qwen3_coder"] + "\n<tool_call>\n<function=g.h>\n</function>\n</tool_call>",
    "minimax_m2": XML_SAMPLES["minimax_m2"].replace("</mini", '<invoke name="g.h">\n</invoke>\n</mini'),
    "deepseek_v31": V31 + SAMPLES["deepseek_v31"].removeprefix("<｜tool▁calls▁begin｜>"),
}


@pytest.mark.parametrize("style", sorted((*FORMATS, *XML_FORMATS)))
def test_forced_calls_are_read_as_calls(compiler: GrammarCompiler, tokenizer: HfTokenizer, style: str) -> None:
    forced = call_grammar(style, TOOLS, tokenizer, at_most_one=False)
    single = call_grammar(style, TOOLS, tokenizer, at_most_one=True)
    for text, n_calls in ((SAMPLES[style], 1), (TWICE[style], 2)):
        assert fits(compiler, tokenizer, text, calls=forced)
        reader = reader_of(style, {one.name: one.parameters for one in TOOLS})
        assert len(MessageReader(None, reader).whole(text).calls) == n_calls
    assert fits(compiler, tokenizer, SAMPLES[style], calls=single)
    assert not fits(compiler, tokenizer, TWICE[style], calls=single)
    for wrong in ("Hello", SAMPLES[style].replace("1", '"x"'), re.sub(r"\bf\b", "other", SAMPLES[style])):
        assert not fits(compiler, tokenizer, wrong, calls=forced)


@pytest.mark.parametrize("style", sorted((*FORMATS, *XML_FORMATS)))
def test_free_text_or_good_calls(compiler: GrammarCompiler, tokenizer: HfTokenizer, style: str) -> None:
    auto = auto_grammar(style, TOOLS, tokenizer, at_most_one=False)
    single = auto_grammar(style, TOOLS, tokenizer, at_most_one=True)
    for text in ("Hello, you!", SAMPLES[style]):
        assert fits(compiler, tokenizer, text, calls=auto) and fits(compiler, tokenizer, text, calls=single)
    assert fits(compiler, tokenizer, TWICE[style], calls=auto)
    assert not fits(compiler, tokenizer, TWICE[style], calls=single)
    assert not fits(compiler, tokenizer, SAMPLES[style].replace("1", '"x"'), calls=auto)


@pytest.mark.parametrize("tokens", [(), ("<tool_call>", "</tool_call>"), marks_of("qwen3_coder")])
def test_calls_without_their_mark_are_enforced_too(tokens: tuple[str, ...]) -> None:
    """tokens: those of the marks that are control tokens."""
    backend = byte_level()
    backend.add_special_tokens([AddedToken(mark, special=True) for mark in tokens])
    own = HfTokenizer(backend, {"type": "ByteLevel"}, {"eos_token": "</s>"})
    compiler = GrammarCompiler(own, len(own), [own.eos_id or 0])

    def allows(text: str, grammar: str) -> bool:
        matcher = matcher_behind(compiler, own, text, StructuredOutputsParams(calls=grammar))
        return matcher is not None and bool(matcher.mask()[(own.eos_id or 0) // 8] >> (own.eos_id or 0) % 8 & 1)

    auto, single = (auto_grammar("qwen3_coder", TOOLS, own, at_most_one=one) for one in (False, True))
    marked = XML_SAMPLES["qwen3_coder"]
    bare = marked.removeprefix("<tool_call>\n")
    unclosed = bare.removesuffix("\n</tool_call>")
    for text in (bare, unclosed, f"So: {bare}", "a < b", "<function", "<tool_call"):
        assert allows(text, auto) and allows(text, single), text
    for text in (f"{unclosed}\n{bare}\n{marked} Done.", f"{marked}{bare}"):
        assert allows(text, auto) and not allows(text, single), text
    for text in (bare, unclosed, f"{marked}\n{bare}", f"So {unclosed}"):
        assert not allows(text.replace("1", '"x"'), auto), text
    for text in ("<function=nobody>", "<function=f> and", "<function=f>\n</function>", f"<tool_call> {bare}"):
        assert not allows(text, auto) and not allows(text, single), text


@pytest.mark.parametrize("style", sorted({*FORMATS, *XML_FORMATS} - {"llama3_json"}))
def test_marks_may_be_control_tokens(style: str) -> None:
    """Which no text may write, so that the grammar has to name them."""
    backend = byte_level()
    backend.add_special_tokens([AddedToken(mark, special=True) for mark in marks_of(style)])
    own = HfTokenizer(backend, {"type": "ByteLevel"}, {"eos_token": "</s>"})
    compiler = GrammarCompiler(own, len(own), [own.eos_id or 0])
    tools = [*TOOLS, OfferedTool("s", {"type": "object", "properties": {"t": {"type": "string"}}}, True)]
    samples = [SAMPLES[style], TWICE[style]]
    if style in VALUES:
        before, between, end = VALUES[style]
        head, _, tail = SAMPLES[style].partition(f"{before}a{between}1{end}")
        samples.append(re.sub(r"\bf\b", "s", head) + f"{before}t{between}so\nit{end}" + tail)
    for text in samples:
        for grammar in (call_grammar, auto_grammar):
            params = StructuredOutputsParams(calls=grammar(style, tools, own, at_most_one=False))
            matcher = compiler.compile(grammar_of(params))
            assert all(matcher.accept(token) for token in own.encode(text, add_special_tokens=False)), text
            assert matcher.mask()[(own.eos_id or 0) // 8] >> (own.eos_id or 0) % 8 & 1


TYPED = OfferedTool(
    "f",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "unit": {"$ref": "#/$defs/unit"},
            "days": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "tags": {"type": "array", "items": {"$ref": "#/$defs/unit"}},
        },
        "required": ["city", "tags"],
        "$defs": {"unit": {"enum": ["C", "F"]}},
    },
    True,
)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"city": "Köln </tool_call>", "tags": '["C"]'}, {"city": "Köln </tool_call>", "tags": ["C"]}),
        ({"city": "5", "unit": "F", "days": "7", "tags": "[]"}, {"city": "5", "unit": "F", "days": 7, "tags": []}),
        ({"city": "", "days": "null", "tags": "[]"}, {"city": "", "days": None, "tags": []}),
        ({"city": "x"}, None),
        ({"city": "x", "unit": "K", "tags": "[]"}, None),
        ({"city": "x", "days": "soon", "tags": "[]"}, None),
        ({"city": "x", "tags": '["K"]'}, None),
        ({"city": "x", "tags": "[]", "more": "1"}, None),
    ],
)
@pytest.mark.parametrize("style", sorted(XML_FORMATS))
def test_text_in_tags_fits_its_schema(
    compiler: GrammarCompiler, tokenizer: HfTokenizer, style: str, values: dict[str, str], expected: Any
) -> None:
    before, between, end = VALUES[style]
    head, _, tail = XML_SAMPLES[style].partition(f"{before}a{between}1{end}\n")
    text = head + "".join(f"{before}{key}{between}{value}{end}\n" for key, value in values.items()) + tail
    forced = call_grammar(style, [TYPED], tokenizer, at_most_one=True)
    assert fits(compiler, tokenizer, text, calls=forced) is (expected is not None)
    if expected is not None:
        (call,) = MessageReader(None, reader_of(style, {"f": TYPED.parameters})).whole(text).calls
        assert json.loads(call.arguments) == expected


def test_every_name_that_can_be_given_has_a_reader_and_a_grammar() -> None:
    named = {*typing.get_args(ToolCallParser)} - {"auto", "none", harmony.TOOLS}
    assert named == FORMATS.keys() | XML_FORMATS.keys() == SAMPLES.keys() and VALUES.keys() == XML_FORMATS.keys()


@pytest.mark.parametrize("style", sorted(XML_FORMATS))
def test_bounds_of_bare_text_are_refused_where_they_are_strict(tokenizer: HfTokenizer, style: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "x+"}}}
    with pytest.raises(RequestError, match="'a' as bare text, which cannot be bounded"):
        call_grammar(style, [OfferedTool("f", schema, True)], tokenizer, at_most_one=True)
    assert call_grammar(style, [OfferedTool("f", schema, False)], tokenizer, at_most_one=True)
    for bad in ({"required": ["z"]}, {"minProperties": 1}):
        with pytest.raises(RequestError, match="cannot be enforced"):
            call_grammar(style, [OfferedTool("f", {"type": "object", **bad}, True)], tokenizer, at_most_one=True)
    odd = {"type": "object", "properties": {"a<b": {"type": "integer"}}, "required": ["a<b"]}
    with pytest.raises(RequestError, match="no text may name the argument 'a<b'"):
        call_grammar(style, [OfferedTool("f", odd, False)], tokenizer, at_most_one=True)
    for properties in ([{"a": 1}], 5, {"a": 5}, {"a": [1]}):
        with pytest.raises(RequestError, match="and no object"):
            call_grammar(style, [OfferedTool("f", {"properties": properties}, False)], tokenizer, at_most_one=True)


def test_strict_refuses_what_loose_leaves_out(compiler: GrammarCompiler, tokenizer: HfTokenizer) -> None:
    strict = [OfferedTool("g", {"type": "object", "not": {"required": ["a"]}}, True)]
    with pytest.raises(
        RequestError, match=r": \$\.not in the schema cannot be enforced: say what is allowed, with type, "
    ):
        compiler.compile(
            grammar_of(StructuredOutputsParams(calls=call_grammar("hermes", strict, tokenizer, at_most_one=True)))
        )


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"properties": {"a": {"not": {"type": "string"}}}}, r"\$\.properties\.a\.not in .* with type, enum, const,"),
        ({"items": {"anyOf": [{"uniqueItems": True}]}}, r"\$\.items\.anyOf\[0\]\.uniqueItems in .*: leave it out"),
        ({"if": {}, "then": {}}, r"\$\.if \(and 1 more such keywords\) in .*: write the cases as schemas of anyOf\."),
        ({"minContains": 1}, r"\$\.minContains in the schema cannot be enforced: say with items"),
    ],
)
def test_a_keyword_that_nothing_can_enforce_is_told_with_its_place(
    compiler: GrammarCompiler, schema: dict[str, Any], said: str
) -> None:
    with pytest.raises(RequestError, match=said):
        compiler.compile(grammar_of(StructuredOutputsParams(json=schema)))
    unused = {"type": "string", "$defs": {"x": schema}}
    compiler.compile(grammar_of(StructuredOutputsParams(json=unused)))  # does no harm


def test_every_keyword_with_advice_is_one_that_the_library_refuses(compiler: GrammarCompiler) -> None:
    for key in INSTEAD:
        with pytest.raises(RequestError, match=f"{re.escape(key)} in the schema cannot be enforced"):
            compiler.compile(grammar_of(StructuredOutputsParams(json={key: True})))


def test_the_cache_is_bounded_and_forgets_the_oldest(tokenizer: HfTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = GrammarCompiler(tokenizer, 4096, [2, 0], cache_bytes=5 * grammars._BASE_COST)
    texts = [grammar_of(StructuredOutputsParams(regex=f"a{{{n}}}")) for n in range(1, 30)]
    for text in texts:
        compiler.compile(text)
        assert compiler._cached_bytes <= 5 * grammars._BASE_COST
    assert compiler.cached(texts[0]) is None and compiler.cached(texts[-1]) is not None
    monkeypatch.setattr(grammars, "MAX_CACHED_BYTES", grammars._BASE_COST + 3 * grammars._USE_COST)
    compiler.compile(texts[0])
    assert sum(compiler.cached(texts[0]) is not None for _ in range(10)) == 3  # then it is compiled afresh
    for text in texts:
        compiler.compile(text)
    assert compiler._cached_bytes == sum(one.n_bytes for one in compiler._cache.values())


def test_g07_ten_thousand_schemas_take_no_disk_and_bounded_memory(tokenizer: HfTokenizer) -> None:
    compiler = GrammarCompiler(tokenizer, 4096, [2, 0], cache_bytes=8 << 20)
    process = psutil.Process()
    rss, written = 0, 0
    for i in range(10_000):
        name = f"field_{i}"
        schema = {"type": "object", "properties": {name: {"type": "string"}}, "required": [name]}
        compiler.compile(grammar_of(StructuredOutputsParams(json=schema)))
        assert compiler._cached_bytes <= 8 << 20
        if i == 2000:
            rss, written = process.memory_info().rss, process.io_counters().write_bytes
    assert compiler._cached_bytes == sum(one.n_bytes for one in compiler._cache.values())
    assert process.memory_info().rss - rss < 16 << 20, "compiled grammars are not given back"
    assert process.io_counters().write_bytes == written, "something goes to disk"


@pytest.mark.parametrize(("end_ids", "end"), [([0, 5000], 0), ([5000], 2)])
def test_end_tokens_beyond_the_tokenizer_are_left_out(tokenizer: HfTokenizer, end_ids: list[int], end: int) -> None:
    """As where a model has more logits than its tokenizer tokens; the sampler never takes one of the rest."""
    assert len(tokenizer) <= 4096 and tokenizer.eos_id == 2
    matcher = GrammarCompiler(tokenizer, 5120, end_ids).compile(grammar_of(StructuredOutputsParams(regex="a")))
    (a,) = tokenizer.encode("a", add_special_tokens=False)
    assert matcher.accept(a) and matcher.mask()[end // 8] == 1 << end % 8 and sum(matcher.mask()) == 1 << end % 8


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"regex": "(a"}, 'invalid regex "(a": unclosed group'),
        ({"regex": "a[b"}, 'invalid regex "a[b": unclosed character class'),
        ({"json": {"type": "string", "pattern": "(a"}}, "unclosed group"),
    ],
)
def test_a_bad_pattern_says_why(compiler: GrammarCompiler, asked: dict[str, object], reason: str) -> None:
    with pytest.raises(RequestError) as found:
        compiler.compile(grammar_of(StructuredOutputsParams(**asked)))  # type: ignore[arg-type]
    assert reason in found.value.message and "at 1(" not in found.value.message


def test_copies_are_independent(compiler: GrammarCompiler, tokenizer: HfTokenizer) -> None:
    first = compiler.compile(grammar_of(StructuredOutputsParams(regex="ab")))
    second = compiler.compile(grammar_of(StructuredOutputsParams(regex="ab")))
    (a,) = tokenizer.encode("a", add_special_tokens=False)
    before = second.mask()
    assert first.accept(a) and second.mask() == before != first.mask()
    assert not second.accept(2) and second.error and not first.error


def test_a_trial_looks_behind_the_reasoning(compiler: GrammarCompiler) -> None:
    bad = tried(compiler, StructuredOutputsParams(regex="[^\\s\\S]", begins_after="</think>"), lambda: None)
    assert (
        bad.failure is not None and bad.failure.code is Code.INVALID_GRAMMAR and isinstance(bad.error(), RequestError)
    )
    params = StructuredOutputsParams(json={"type": "object"}, begins_after="</think>")
    good = tried(compiler, params, lambda: None)
    assert good.error() is None and json.loads(good.grammar) and good.grammar == grammar_of(params)


@pytest.mark.parametrize("text", ['root ::= foo "x"', 'root ::= "a" (', "root ::= ::= x", "a ::= b\nb ::= a"])
def test_bad_gbnf_is_the_requests_fault(text: str) -> None:
    with pytest.raises(RequestError) as caught:
        grammar_of(StructuredOutputsParams(grammar=text))
    assert caught.value.code == "invalid_grammar"
